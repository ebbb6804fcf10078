"""Runs one rank of a plan on fake tensors: a fake accelerator, a fake process group and a ledger of what happens.

May import torch, DeepSpeed, transformers and the packages that build and step an engine. `report` imports none of them.
"""
