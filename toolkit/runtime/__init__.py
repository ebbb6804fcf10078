"""One rank's run: assemble it, train step by step, run hooks between steps, summarise.

May import torch, DeepSpeed and the packages below; never strategies, planner, sessions or commands.
"""
