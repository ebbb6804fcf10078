"""When tensor ranks can hold shares of the tokens between sharded matrices, and why not."""

from __future__ import annotations

from toolkit.plans.plan import Job

ROUND = 64
"""Padded rows are as long as a multiple of this or as the longest sequence allowed, as in `runtime/data/samples.py`,
which this package can't import (a test compares)."""


def why_whole(job: Job, tp: int, parts: int = 1) -> str:
    """Why `tp` tensor ranks must hold complete residuals; empty if each can hold its share of the tokens.

    `parts`: sequence and ring ranks, of which each holds its part of a row.
    Whether shares are right for the type of model is found by the float64 proof.
    """
    tokens = job.workload.seq_len // parts
    if tokens % tp or ROUND % tp:
        most = min(tokens & -tokens, ROUND)
        return f"tp {tp} does not divide rows of {tokens} tokens, or of multiples of {ROUND}; tp up to {most} does"
    if job.workload.compiled:
        return "compiled layers have not been tried on shares of tokens; use model.compile: none"
    if job.fixed.get("tensor_by") == "autotp":
        return "AutoTP keeps complete residuals; leave strategy.tensor_by out"
    return ""
