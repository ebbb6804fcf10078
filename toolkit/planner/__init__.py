"""The planner: ranks the plans that strategies propose, and explains the result.

May import `plans`, `cost`, `recipe`, `launching`, `errors` and `units`; no torch.
"""
