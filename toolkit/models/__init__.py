"""Model specs: shape and exact parameter counts from a Hugging Face config, without transformers.

May import `errors` and `units`; no torch.
"""
