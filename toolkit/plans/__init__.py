"""Plans: a point in the product of axes, what DeepSpeed can run, and the DeepSpeed config of a plan.

May import `recipe`, `clusters`, `models`, `resources` and `errors`; no torch.
"""
