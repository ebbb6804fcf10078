"""Tensor, sequence and ring parallelism for any Hugging Face model: which modules are sharded how, and collectives.

May import models and distributed; imported by build_engine, pipeline and proofs.
"""
