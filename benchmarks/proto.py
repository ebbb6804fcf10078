import csv, sys, dataclasses, collections, math
sys.path.insert(0,'/work/wt-planner')
from toolkit.hardware import DEVICES
from toolkit.cluster import Cluster
from toolkit.model_spec import ModelSpec
from toolkit.software import software_of
from toolkit import timing
from toolkit.timing import Execution, Repeat, seconds
from toolkit.calibration import CALIBRATION, Calibration
NAMES={'A100':'A100-SXM4-80GB','H100':'H100-SXM5-80GB','H200':'H200-SXM','V100':'V100-SXM2-32GB','GB200':'GB200','B200':'B200-SXM','GB300':'GB300','A800':'A800-SXM4-80GB','MI325X':'MI325X'}
SMS={'A100':108,'H100':132,'H200':132,'V100':80,'GB200':148,'B200':148,'GB300':148,'A800':108,'MI325X':304}
REP={'full':Repeat(1,1,1,1),'none':Repeat(),'selective':Repeat(0,1,0,0),'selective_op':Repeat(.5,0,1,.5),'selective_layer2':Repeat(.5,.5,.5,.5),
 'partial_mlp':Repeat(0,0,1,0,1),'partial_save_dot':Repeat(0,1,1,0),'partial_save_qkv_outproj':Repeat(0,1,1,0,1),'unknown':Repeat(),'partial/unknown':Repeat()}
def num(v,d):
    try: return float(v)
    except: return d
def build(r):
    i=lambda k,d=1:int(num(r[k],d))
    g=r['gpu']; d=DEVICES[NAMES[g]]
    if g=='A100' and r['gpu_mem_gb']=='40': d=DEVICES['A100-SXM4-40GB']
    import re
    power=1.0
    v=r['gpu_variant']
    kw=dict(multiprocessors=SMS[g], in_switch_reduction=g in('H100','H200','B200','GB200','GB300'))
    mt=re.search(r'([\d.]+) ?TB/s',v)
    if mt: kw['memory_bytes_per_second']=float(mt.group(1))*1e12
    mw=re.search(r'(\d+) ?W',v)
    d=dataclasses.replace(d,**kw)
    W={'H100':700,'H200':700,'GB200':1200,'B200':1000,'GB300':1400,'A100':400,'V100':300,'A800':400,'MI325X':1000}[g]
    if mw: W=int(mw.group(1))
    s=min(1,(W/(d.peak_flops/1e12)/(700/989)))**CALIBRATION.power
    if s<1:
        d=dataclasses.replace(d,matmul_flops=d.matmul_flops*s,fp8_matmul_flops=d.fp8_matmul_flops*s,peak_flops=d.peak_flops*s)
    n=i('n_gpus'); gpn=min(i('gpus_per_node',8),n)
    if g in('GB200','GB300'): gpn=min(64,n)
    inter=num(r['inter_gbps_per_gpu'],d.inter_gbps)/8*1e9
    cl=Cluster(name='x',device=d,nodes=max(1,math.ceil(n/gpn)),devices_per_node=gpn,intra_bytes_per_second=d.link_bytes_per_second,inter_bytes_per_second=inter,host_memory_bytes=1)
    L,h,f,a,kv,V=[i(k) for k in('n_layers','hidden','ffn','heads','kv_heads','vocab')]
    hd=h//a; gated=r['gated_mlp']=='1'
    lp=h*hd*a*2+2*h*hd*kv+(3 if gated else 2)*h*f
    emb=V*h; head=0 if r['tied_emb']=='1' else V*h
    ms=ModelSpec(model_type='gpt',layers=L,hidden=h,heads=a,kv_heads=kv,head_dim=hd,ffn=f,gated_mlp=gated,vocab=V,max_positions=0,tied_embeddings=head==0,embedding_params=emb,layer_params=(lp,)*L,layer_active_params=(lp,)*L,head_params=head)
    tp,pp,cp,dp=i('tp'),i('pp'),i('cp'),i('dp')
    mb=i('micro_batch',0); ga=int(num(r['grad_accum'],0)); gb=i('global_batch',0)
    if not mb and pp>1 and gb%(dp*pp)==0: mb,ga=gb//(dp*pp),pp
    if not mb: mb=1
    if not ga: ga=max(1,gb//(dp*mb))
    fl=r['flash_attn']=='1' or (r['flash_attn']=='?' and r['act_ckpt']!='selective')
    sw=software_of(r['framework'],device=NAMES[g],flash=fl,precision=r['precision'],tensor_only=pp==1)
    return Execution(model=ms,cluster=cl,software=sw,seq_len=i('seq_len'),micro_batch=mb,grad_accum=ga,dp=dp,tp=tp,pp=pp,chunks=i('vpp',2 if 'nterleav' in r['pp_schedule'] else 1),cp=cp,zero_stage=i('zero_stage',0),zero_group=i('shard_group'),sequence_shards=r['megatron_sp']=='1',repeat=REP[r['act_ckpt']],fp8='fp8' in r['precision'] and 'rowwise' not in r['precision'],fp8_gather='fp8' in r['precision'] and 'FSDP2' in r['framework'])
def load(path='/work/shared/data/published.csv'):
    out=[]
    for r in csv.DictReader(open(path)):
        if not r['step_time_s_derived'] or r['offload'] not in('none','unknown'): continue
        out.append((r,build(r),float(r['step_time_s_derived'])))
    return out
def mape_by_source(data,cal):
    by=collections.defaultdict(list)
    for r,e,t in data: by[(r['split'],r['source_id'])].append(seconds(e,cal).total/t-1)
    return by
def report(data,cal,splits=('calib','dev','reference')):
    by=mape_by_source(data,cal); out={}
    for sp in splits:
        ms=[]
        for (s,src),v in sorted(by.items()):
            if s!=sp: continue
            m=sum(map(abs,v))/len(v); ms.append(m)
            print(f"  {sp:9s} {src:24s} n={len(v):4d} mape={m:6.1%} bias={sum(v)/len(v):+6.1%}")
        if ms: print(f"{sp} mean {sum(ms)/len(ms):.2%}"); out[sp]=sum(ms)/len(ms)
    return out
if __name__=='__main__':
    import time
    d=load(); t=time.time(); report(d,CALIBRATION); print(time.time()-t)
