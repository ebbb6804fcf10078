"""The DeepSpeed engine behind one call per step, with its optimizers, gradient norm and checkpoint state.

May import models, metrics, checkpoint and distributed; pipeline and islands build on it.
"""
