"""Hugging Face models: building them, first weights, parameter slices, micro-batches, losses, tiny models.

May import distributed and the pure packages of toolkit.
"""
