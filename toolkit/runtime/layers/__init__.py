"""How decoder layers are computed: what they recompute, which fused kernels they use, and whether they are compiled.

Works on any Hugging Face model, after it is built and sharded and before the engine takes it.
"""
