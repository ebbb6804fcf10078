"""Samples: loading, mixing, packing, streaming, their global order, and prefetching of batches.

May import corpus, models and distributed.
"""
