"""Saving, verifying, resuming and exporting training state, independent of strategy and world size.

May import models, data.sample_order and distributed; engines implement `fragments.Stateful`.
"""
