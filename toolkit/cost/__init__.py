"""The cost model: memory and step time of a plan by part, in closed formulas, and its validation.

May import `plans`, `clusters`, `models`, `recipe`, `errors` and `units`; no torch.
"""
