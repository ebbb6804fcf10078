"""Checkpoints on disk: file format, layout of parameter fragments, and the directory of checkpoints.

May import `errors` and `units`; no torch.
"""
