"""Tensor and sequence parallelism for any Hugging Face model: which modules are sharded how, and the collectives.

May import models and distributed; imported by build_engine, pipeline and proofs.
"""
