import dataclasses, sys
import proto, protofit
from protofit import *
N=['matmul','attention','stream','launch_seconds','tp_exposed','interference','fixed_seconds']
for p in (.5,.6,.75):
    st=dataclasses.replace(CALIBRATION,inter=.75,wave=.5,flash_half_seq=800.,ring_hop_seconds=10e-6,power=p)
    proto.CALIBRATION=st
    data=load(); calib=[d for d in data if d[0]['split']=='calib']
    c=fit(calib,N,st); print(p); report(data,c,('dev','reference'))
