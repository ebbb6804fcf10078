"""Local SGD: islands that train independently and exchange weights, synchronously or asynchronously.

May import engine, models, metrics, checkpoint and distributed; imported by build_engine and the training run.
"""
