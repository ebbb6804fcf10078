"""Orders of pipeline schedules: complete, free of deadlocks, those of the literature, and as short as formulas say."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.cost.execution import V_BUBBLE
from toolkit.plans.pipeline_bounds import balance_ranks
from toolkit.plans.pipeline_orders import (
    Action,
    Kind,
    actions,
    boundaries,
    computations,
    layers_by_rank,
    micro_batches_problem,
    rank_of,
    seconds,
    stages_of,
)

CASES = [
    ("1f1b", 3, 1, 5),
    ("interleaved", 2, 2, 4),
    ("interleaved", 2, 3, 6),
    ("interleaved", 4, 2, 10),
    ("interleaved", 3, 4, 3),
    ("zero_bubble", 2, 2, 3),
    ("zero_bubble", 4, 2, 9),
]
ALIKE = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


@pytest.mark.parametrize(("schedule", "pp", "chunks", "micro"), CASES)
def test_every_pass_runs_once_on_the_rank_of_its_stage(schedule: str, pp: int, chunks: int, micro: int) -> None:
    orders = computations(schedule, pp, chunks, micro)
    found = [action for order in orders for action in order]
    assert len(found) == len(set(found))
    backward = [Kind.INPUT, Kind.WEIGHT] if schedule == "zero_bubble" else [Kind.BACKWARD]
    everything = {Action(k, s, m) for k in (Kind.FORWARD, *backward) for s in range(pp * chunks) for m in range(micro)}
    assert set(found) == everything
    for rank, order in enumerate(orders):
        assert {action.stage for action in order} == set(stages_of(schedule, pp, chunks, rank))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("schedule", "pp", "chunks", "micro"), CASES)
def test_ranks_with_strictly_ordered_messages_never_wait_in_a_circle(
    schedule: str, pp: int, chunks: int, micro: int, training: bool
) -> None:
    """Each rank blocks in every receive, and messages between two ranks arrive in the order in which they were sent."""
    orders = [deque(order) for order in actions(schedule, pp, chunks, micro, training=training)]
    links: dict[tuple[int, int], deque[tuple[Kind, int, int]]] = {}
    passes = sum(len(order) for order in orders)
    while any(orders):
        before = sum(map(len, orders))
        for rank, order in enumerate(orders):
            while order:
                kind, stage, number = order[0]
                if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                    other = stage + 1 if kind is Kind.SEND_FORWARD else stage - 1
                    wanted = Kind.RECEIVE_FORWARD if kind is Kind.SEND_FORWARD else Kind.RECEIVE_BACKWARD
                    link = links.setdefault((rank, rank_of(schedule, pp, other)), deque())
                    link.append((wanted, other, number))
                elif kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                    source = rank_of(schedule, pp, stage - 1 if kind is Kind.RECEIVE_FORWARD else stage + 1)
                    link = links.setdefault((source, rank), deque())
                    if not link:
                        break
                    assert link.popleft() == (kind, stage, number)
                order.popleft()
        assert sum(map(len, orders)) < before
    assert not any(links.values())
    assert passes > 0


@pytest.mark.parametrize(
    ("name", "schedule", "chunks", "sizes"),
    [
        ("ScheduleInterleaved1F1B", "interleaved", 2, [(2, 2), (2, 4), (4, 5), (4, 10)]),
        ("ScheduleInterleaved1F1B", "interleaved", 3, [(3, 9)]),
        ("ScheduleZBVZeroBubble", "zero_bubble", 2, [(2, 3), (4, 8), (3, 7)]),
    ],
)
def test_orders_are_those_of_torch(name: str, schedule: str, chunks: int, sizes: list[tuple[int, int]]) -> None:
    from torch.distributed.pipelining import schedules

    short = {
        schedules.FORWARD: "F",
        schedules.FULL_BACKWARD: "B",
        schedules.BACKWARD_INPUT: "I",
        schedules.BACKWARD_WEIGHT: "W",
    }
    for pp, micro in sizes:
        stages: Any = [
            SimpleNamespace(num_stages=pp * chunks, group_size=pp, group_rank=0, submod=None, stage_index=index)
            for index in range(chunks)
        ]
        theirs = getattr(schedules, name)(stages, micro, loss_fn=lambda output, target: output).pipeline_order
        expected = [
            [(short[a.computation_type], a.stage_index, a.microbatch_index) for a in order if a]
            for order in theirs.values()
        ]
        assert [[tuple(a) for a in order] for order in computations(schedule, pp, chunks, micro)] == expected


@pytest.mark.parametrize(("pp", "micro"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_a_step_takes_what_the_formulas_of_the_planner_say(pp: int, micro: int) -> None:
    ideal = {chunks: 3 * (micro + (pp - 1) / chunks) for chunks in (1, 2, 4)}
    assert seconds("1f1b", pp, 1, micro, ALIKE) == ideal[1]
    for chunks in (2, 4):
        each = {kind: cost / chunks for kind, cost in ALIKE.items()}
        assert seconds("interleaved", pp, chunks, micro, each) == pytest.approx(ideal[chunks])
    halves = {kind: cost / 2 for kind, cost in ALIKE.items()}
    assert seconds("zero_bubble", pp, 2, micro, halves) == pytest.approx(3 * (micro + V_BUBBLE * (pp - 1) / 2))


@pytest.mark.parametrize(
    ("schedule", "pp", "micro", "words"),
    [
        ("interleaved", 4, 3, "at least 4 micro-batches per step to fill; there are 3; use 4"),
        ("interleaved", 4, 9, "equal rounds of at least 4; there are 9; use 8 or 10"),
        ("zero_bubble", 4, 2, "at least 7 micro-batches per step to fill; there are 2; use 7"),
    ],
)
def test_micro_batches_that_do_not_fill_are_refused_with_the_nearest(
    schedule: str, pp: int, micro: int, words: str
) -> None:
    problem = micro_batches_problem(schedule, pp, micro)
    assert problem is not None
    assert words in problem


def test_micro_batches_that_fill_are_accepted() -> None:
    assert micro_batches_problem("1f1b", 8, 1) is None
    assert [m for m in range(1, 13) if micro_batches_problem("interleaved", 4, m) is None] == [4, 5, 6, 7, 8, 10, 12]
    assert [m for m in range(1, 5) if micro_batches_problem("zero_bubble", 2, m) is None] == [3, 4]


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_ranks_get_equal_work_with_the_head_counted(schedule: str) -> None:
    bounds = balance_ranks(14, 2.0, schedule, 4, 2)
    own = layers_by_rank(bounds, schedule, 4)
    head = rank_of(schedule, 4, 7)
    assert sum(own) == 14
    assert own[head] == 2
    assert {layers for rank, layers in enumerate(own) if rank != head} == {4}


def test_boundaries_of_a_rank() -> None:
    assert [boundaries("1f1b", 3, 1, rank) for rank in range(3)] == [1, 2, 1]
    assert [boundaries("interleaved", 2, 2, rank) for rank in range(2)] == [3, 3]
    assert [boundaries("zero_bubble", 2, 2, rank) for rank in range(2)] == [2, 2]
