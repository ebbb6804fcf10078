"""The toolkit's own optimizers in plain torch: update rules, Muon, packed states, 1-bit Adam.

May import checkpoints, plans, recipe, and from the runtime: checkpoint, distributed, models.
"""
