"""Where records go: terminal, local files, TensorBoard, W&B, sinks of the user.

A sink that fails is disabled, and the run continues. May import runtime.metrics and reports.
"""
