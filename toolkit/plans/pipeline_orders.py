"""In which order the ranks of a pipeline compute: 1F1B, interleaved chunks (Megatron's order) and zero bubble (ZB-V).

A model is cut into `pp · chunks` stages. `1f1b` has one stage per rank. `interleaved` gives rank r the stages r,
r + pp, r + 2·pp, …, so the pipeline fills and drains in steps of one chunk. `zero_bubble` folds the stages into a V:
rank r has the stages r and 2·pp − 1 − r, and weight gradients are computed where a rank would otherwise wait.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

V_CHUNKS = 2
"""Chunks per rank of a V: down and up again."""


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and weights."""
    INPUT = "I"
    """Gradients of inputs only; weights follow later."""
    WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


class Action(NamedTuple):
    """One action of a rank on one micro-batch in one of its stages."""

    kind: Kind
    stage: int
    micro: int


Orders = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank."""


def rank_of(schedule: str, pp: int, stage: int) -> int:
    """The pipeline rank that runs a stage."""
    return 2 * pp - 1 - stage if schedule == "zero_bubble" and stage >= pp else stage % pp


def stages_of(schedule: str, pp: int, chunks: int, rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, in the order of the model."""
    return tuple(stage for stage in range(pp * chunks) if rank_of(schedule, pp, stage) == rank)


def layers_by_rank(bounds: Sequence[int], schedule: str, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline rank, over all of its stages; `bounds`: first layer of each stage, and their number."""
    sums = [0] * pp
    for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
        sums[rank_of(schedule, pp, stage)] += high - low
    return tuple(sums)


def boundaries(schedule: str, pp: int, chunks: int, rank: int) -> int:
    """Boundaries between the stages of a rank and stages of other ranks."""
    last = pp * chunks - 1
    others = [
        other
        for stage in stages_of(schedule, pp, chunks, rank)
        for other in (stage - 1, stage + 1)
        if 0 <= other <= last and rank_of(schedule, pp, other) != rank
    ]
    return len(others)


def micro_batches_problem(schedule: str, pp: int, micro_batches: int) -> str | None:
    """Why a schedule can't run this number of micro-batches per step, with the nearest that work; None if it can."""
    if _runs(schedule, pp, micro_batches):
        return None
    least = _least(schedule, pp)
    low = next((m for m in range(micro_batches - 1, least - 1, -1) if _runs(schedule, pp, m)), None)
    high = next(m for m in itertools.count(max(micro_batches + 1, least)) if _runs(schedule, pp, m))
    if micro_batches < least:
        what = f"needs at least {least} micro-batches per step to fill"
    else:
        what = f"needs micro-batches in equal rounds of at least {pp}"
    return f"{schedule} on {pp} ranks {what}; there are {micro_batches}; use {f'{low} or ' if low else ''}{high}"


def _least(schedule: str, pp: int) -> int:
    return {"1f1b": 1, "interleaved": pp, "zero_bubble": 2 * pp - 1}[schedule]


def _runs(schedule: str, pp: int, micro_batches: int) -> bool:
    in_rounds = schedule != "interleaved" or micro_batches % _rounds(pp, micro_batches) == 0
    return micro_batches >= _least(schedule, pp) and in_rounds


def computations(schedule: str, pp: int, chunks: int, micro_batches: int) -> Orders:
    """What each rank computes, without transfers."""
    if schedule == "zero_bubble":
        return tuple(tuple(_v_order(pp, rank, micro_batches)) for rank in range(pp))
    return tuple(tuple(_looped_order(schedule, pp, chunks, rank, micro_batches)) for rank in range(pp))


@lru_cache(maxsize=64)
def actions(schedule: str, pp: int, chunks: int, micro_batches: int, *, training: bool = True) -> Orders:
    """What each rank does, with transfers between ranks; without `training`, forward passes only.

    Sends follow what they send. A receive stands where its send stands in one common order of all ranks. So no rank
    waits for another one in a circle, even where sends and receives between two ranks run strictly one after another.
    """
    todo = [
        [action for action in order if training or action.kind is Kind.FORWARD]
        for order in computations(schedule, pp, chunks, micro_batches)
    ]
    done: list[list[Action]] = [[] for _ in range(pp)]
    ready: set[Action] = set()
    while any(todo):
        before = len(ready)
        for rank in range(pp):
            if todo[rank] and _needs(todo[rank][0], pp * chunks) <= ready:
                action = todo[rank].pop(0)
                ready.add(action)
                done[rank].append(action)
                _transfer(action, schedule, pp, chunks, done)
        assert len(ready) > before, "the order of computations waits for itself"
    return tuple(tuple(order) for order in done)


def _needs(action: Action, stages: int) -> set[Action]:
    """What must have been computed before; backward passes by their first part, which makes the input's gradient."""
    kind, stage, micro = action
    if kind is Kind.FORWARD:
        return {Action(kind, stage - 1, micro)} if stage else set()
    if kind is Kind.WEIGHT:
        return {Action(Kind.INPUT, stage, micro)}
    own = {Action(Kind.FORWARD, stage, micro)}
    return own | ({Action(kind, stage + 1, micro)} if stage < stages - 1 else set())


def _transfer(action: Action, schedule: str, pp: int, chunks: int, done: Sequence[list[Action]]) -> None:
    """Add the transfer of what an action has computed, if the neighbouring stage is on another rank."""
    kind, stage, micro = action
    forward = kind is Kind.FORWARD
    other = stage + 1 if forward else stage - 1
    if kind is Kind.WEIGHT or not 0 <= other < pp * chunks:
        return
    sender, receiver = rank_of(schedule, pp, stage), rank_of(schedule, pp, other)
    if sender != receiver:
        done[sender].append(Action(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, stage, micro))
        done[receiver].append(Action(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, other, micro))


def seconds(schedule: str, pp: int, chunks: int, micro_batches: int, costs: Mapping[Kind, float]) -> float:
    """Time of a step if a stage's actions take these times and transfers none."""
    todo = [list(order) for order in computations(schedule, pp, chunks, micro_batches)]
    ends: dict[Action, float] = {}
    clock = [0.0] * pp
    while any(todo):
        for rank in range(pp):
            while todo[rank] and (needs := _needs(todo[rank][0], pp * chunks)) <= ends.keys():
                action = todo[rank].pop(0)
                clock[rank] = max(clock[rank], *(ends[need] for need in needs), 0.0) + costs[action.kind]
                ends[action] = clock[rank]
    return max(clock)


def _rounds(pp: int, micro_batches: int) -> int:
    """How often a rank starts with its first chunk again: as often as a round of at least `pp` micro-batches fits."""
    return max(1, micro_batches // pp)


def _looped_order(schedule: str, pp: int, chunks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    per_round = micro_batches // _rounds(pp, micro_batches)
    total = micro_batches * chunks
    ahead = pp - 1 - rank
    warm_up = min(total, ahead if schedule == "1f1b" else (chunks - 1) * per_round + 2 * ahead)
    started: Counter[Action] = Counter()

    def action(kind: Kind, number: int) -> Action:
        chunk = number // per_round % chunks if chunks > 1 else 0
        stage = (chunk if kind is Kind.FORWARD else chunks - 1 - chunk) * pp + rank
        key = Action(kind, stage, 0)
        started[key] += 1
        return key._replace(micro=started[key] - 1)

    yield from (action(Kind.FORWARD, number) for number in range(warm_up))
    for number in range(total - warm_up):
        yield action(Kind.FORWARD, warm_up + number)
        yield action(Kind.BACKWARD, number)
    yield from (action(Kind.BACKWARD, number) for number in range(total - warm_up, total))


def _v_order(pp: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """ZB-V (arXiv 2401.10241, section 6), as if there were enough micro-batches; the surplus ones are left out."""
    wanted = max(2 * pp - 1, micro_batches)
    down, up = rank, 2 * pp - 1 - rank
    done: Counter[tuple[Kind, int]] = Counter()
    order: list[Action] = []

    def add(kind: Kind, stage: int) -> None:
        order.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    def backward(stage: int) -> None:
        add(Kind.INPUT, stage)
        add(Kind.WEIGHT, stage)

    for _ in range(2 * (pp - rank) - 1):
        add(Kind.FORWARD, down)
    for _ in range(rank):
        add(Kind.FORWARD, up)
        add(Kind.FORWARD, down)
    for _ in range(pp - rank):
        add(Kind.FORWARD, up)
        backward(up)
    while done[Kind.FORWARD, up] < done[Kind.FORWARD, down] or done[Kind.FORWARD, down] < wanted:
        if done[Kind.FORWARD, down] < wanted:
            add(Kind.FORWARD, down)
        backward(down)
        add(Kind.FORWARD, up)
        backward(up)
    for _ in range(rank):
        add(Kind.INPUT, down)
        add(Kind.INPUT, up)
    for _ in range(pp - rank):
        add(Kind.INPUT, down)
        add(Kind.WEIGHT, down)
    for stage in (up, down):
        while done[Kind.WEIGHT, stage] < done[Kind.INPUT, stage]:
            add(Kind.WEIGHT, stage)
    return iter([action for action in order if action.micro < micro_batches])


def pipeline_zero_stages(precision: str) -> tuple[int, ...]:
    """ZeRO stages to propose of those that DeepSpeed's pipeline engine supports.

    In bf16, micro-batches are summed in fp32 under ZeRO 1 and in bf16 without ZeRO, which rounds and takes no fewer
    bytes: DeepSpeed 0.19.8 then holds gradients and their sums. A recipe may still ask for it.
    """
    return (1,) if precision == "bf16" else (0, 1)
