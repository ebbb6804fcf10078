"""Proofs on tiny models that a split computes what one process computes, before a real run.

May import build_engine, pipeline, sharding, models and supervision.
"""
