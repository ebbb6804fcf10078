"""DeepSpeed's AutoTP, tried on a small twin: real processes against one, since its shards live in the engine only."""

from __future__ import annotations

from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Verdict
from toolkit.recipe.sections import Model, Train
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.proofs.coverage import LOSS_TOLERANCE, NORM_TOLERANCE, REFERENCE, SEQUENCES, STEPS, run_plan
from toolkit.runtime.supervision.call_on_ranks import call_on_ranks, first_failure

TIMEOUT_SECONDS = 240.0


def try_autotp(twin: Model, tp: int) -> Verdict:
    """Whether a few steps under AutoTP have the losses and gradient norms of one process."""
    train = Train(global_batch=SEQUENCES, steps=STEPS, lr=1e-3, schedule="constant", warmup=0.0)
    plan = Plan(
        strategy="tensor_parallel",
        tp=tp,
        zero_stage=1,
        micro_batch=SEQUENCES,
        precision="fp32",
        tensor_by="autotp",
    )
    whole = call_on_ranks(run_plan, twin, REFERENCE, train, nproc=1, timeout_seconds=TIMEOUT_SECONDS)
    cut = call_on_ranks(run_plan, twin, plan, train, nproc=tp, timeout_seconds=TIMEOUT_SECONDS)
    for results, what in ((whole, "one process"), (cut, "AutoTP")):
        if failure := first_failure(results):
            return Verdict(False, f"a small twin fails under {what}: {failure.reason}")
    loss = largest_difference(whole[0].loss, cut[0].loss)
    norm = largest_difference(whole[0].grad_norm, cut[0].grad_norm)
    if loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE:
        return Verdict(True)
    return Verdict(
        False,
        f"AutoTP is not exact for this model: on a small twin the loss is off by {loss:.1e}, "
        f"the gradient norm by {norm:.1e}; leave strategy.tensor_by out",
    )
