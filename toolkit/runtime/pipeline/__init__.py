"""Pipeline parallelism for any Hugging Face model: find the split, run its stages on DeepSpeed's pipeline engine.

May import engine, models, metrics and distributed; imported by build_engine and proofs.
"""
