"""This machine: measured rates for the cost model, hardware counters, network interfaces.

May import torch, DeepSpeed's accelerator, psutil and `runtime.distributed`; no other runtime package.
"""
