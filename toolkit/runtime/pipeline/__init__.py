"""Pipeline parallelism for any Hugging Face model: find the split, run one stage per rank on DeepSpeed's pipeline.

May import engine, models, metrics and distributed; imported by build_engine and proofs.
"""
