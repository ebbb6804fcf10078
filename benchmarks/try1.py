from protofit import *
N=[n for n in NAMES_ if n!='inter']
for inter in (.6,.7,.8,.9): 
    print(inter); quick(N,dataclasses.replace(CALIBRATION,inter=inter))
