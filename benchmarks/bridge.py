from groups import *
data=load(); calib=[d for d in data if d[0]['split']=='calib']
c=fit(calib,NAMES_)
for s in ('megatron-bridge','nemo-24.07'): groups(data,c,s,['gpu','model'] if s[0]=='m' else ['model'])
groups(data,c,'internevo',['tp','n_gpus','shard_group'])
