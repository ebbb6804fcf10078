"""This machine: measured rates for the cost model, hardware counters, network interfaces.

May import torch, DeepSpeed's accelerator and psutil; no other runtime package.
"""
