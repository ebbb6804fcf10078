import sys; sys.path.insert(0,'/work/wt-planner/benchmarks')
from protofit import *
def groups(data,cal,src,keys):
    by=collections.defaultdict(list)
    for r,e,t in data:
        if r['source_id']!=src: continue
        T=seconds(e,cal); by[tuple(r[k] for k in keys)].append((T.total/t-1,T,t))
    for k,v in sorted(by.items(),key=lambda x:str(x[0])):
        tot=sum(x[1].total for x in v); 
        parts=' '.join(f"{p[:6]}={sum(getattr(x[1],p) for x in v)/tot:.2f}" for p in('compute','recompute','tp_comm','sp_comm','pp_bubble','pp_comm','dp_comm','optimizer','fixed'))
        print(src,dict(zip(keys,k)),f"n={len(v)} bias={sum(x[0] for x in v)/len(v):+.1%}",parts)
if __name__=='__main__':
    data=load(); calib=[d for d in data if d[0]['split']=='calib']
    c=fit(calib,NAMES_)



    groups(data,c,'torchtitan-2404',['gpu','model','act_ckpt','precision','framework'])
    groups(data,c,'torchtitan-2412',['model','act_ckpt','precision','seq_len','cp','framework'])
    groups(data,c,'torchtitan-2506',['model','act_ckpt','precision','framework'])
    groups(data,c,'bigscience-a100',['hidden','tp','pp','precision'])
    groups(data,c,'dgxc-gb200',['model','precision','n_gpus','grad_accum'])
    groups(data,c,'dgxc-24.11',['model','precision'])
    groups(data,c,'dgxc-24.11-jax',['model','precision','act_ckpt'])
    groups(data,c,'nemo-launcher-a100',['model'])
    groups(data,c,'internevo',['tp','micro_batch','grad_accum','act_ckpt','n_gpus'])
    groups(data,c,'litgpt-thunder',['framework','n_gpus','zero_stage'])
    groups(data,c,'torchtitan-h200',['n_gpus'])




