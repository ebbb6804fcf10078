from groups import *
start=dataclasses.replace(CALIBRATION,inter=.7)
data=load(); calib=[d for d in data if d[0]['split']=='calib']
c=fit(calib,[n for n in NAMES_ if n!='inter'],start)
for r,e,t in data:
    if r['source_id'] in('bigscience-v100-zero3','bigscience-v100-3d','colossalai'):
        T=seconds(e,c); print(r['source_id'],r['model'],r['framework'],'n',r['n_gpus'],'tp',r['tp'],'pp',r['pp'],'mb',r['micro_batch'],'ga',r['grad_accum'],'meas',t,'pred',round(T.total,1),'comp',round(T.compute,1),'rec',round(T.recompute,1),'dp',round(T.dp_comm,1),'tp',round(T.tp_comm,1),'bub',round(T.pp_bubble,1),r['tflops_per_gpu'],r['notes'][:120])
import contextlib
report(data,c,('dev','reference'))
groups(data,c,'bigscience-a100',['tp','precision','micro_batch'])
groups(data,c,'bigscience-a100',['tp','pp'])
