"""How decoder layers are computed: what they recompute or put off, which fused kernels they use, if they are compiled.

Works on any Hugging Face model, after it is built and sharded and before the engine takes it.
"""
