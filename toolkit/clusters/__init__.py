"""Clusters and devices: what a job runs on, and how fast it is.

May import `recipe`, `resources`, `errors` and `units`; no torch.
"""
