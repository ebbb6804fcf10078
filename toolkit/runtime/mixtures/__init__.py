"""Mixtures of experts: routers, how they are balanced, the load that they give to experts, experts on several ranks.

May import plans, recipe, distributed, models and sharding; imported by build_engine, engine, pipeline and proofs.
"""
