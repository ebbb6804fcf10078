"""Mixtures of experts: their routers, how these are kept balanced, and what load they give to each expert.

May import `recipe`, `plans`, `runtime.distributed` and `runtime.models`.
"""
