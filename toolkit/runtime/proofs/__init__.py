"""Proofs on tiny models that a split computes what one process computes, before a real run.
Also: parameters of model types that the planner's table lacks, counted on the meta device.

May import build_engine, pipeline, sharding, models and supervision.
"""
