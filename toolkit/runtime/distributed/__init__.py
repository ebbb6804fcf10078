"""Process groups, the mesh of ranks, rank-0-first work and random generator states.

May import torch, DeepSpeed and the pure packages of toolkit; no other runtime package.
"""
