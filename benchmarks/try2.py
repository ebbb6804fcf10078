from protofit import *
import toolkit.operators as O, toolkit.timing as TM
start=dataclasses.replace(CALIBRATION,inter=.75)
N=[n for n in NAMES_ if n!='inter']
print('base(CE)'); quick(N,start)
print('pp_exposed'); quick(N+['pp_exposed'],start)
print('inter free,low prior'); quick(N+['inter','pp_exposed'],start)
print('intra free'); quick(N+['intra'],start)
print('no wave'); quick([n for n in N if n!='wave'],dataclasses.replace(start,wave=0.5))
print('no half'); quick([n for n in N if n!='flash_half_seq'],dataclasses.replace(start,flash_half_seq=800.))
print('no ring hop'); quick([n for n in N if n!='ring_hop_seconds'],dataclasses.replace(start,ring_hop_seconds=10e-6))
