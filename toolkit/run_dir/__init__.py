"""The run directory: files that planning writes and workers read, and files that workers write and reports read.

May import `recipe`, `plans`, `checkpoints` and `errors`; no torch.
"""
