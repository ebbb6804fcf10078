"""Asynchronous local SGD: publish a change after each round, apply those of other islands as they arrive; no barrier.

All islands share `S`. A round starts at `S`. At its end an island applies the updates that have arrived, and `S` moves
by its own change and by theirs. A change is weighted by `1 / (1 + n)`, where `n` is the number of changes of other
islands since the round began: equally fast islands have equal weights, a slow one counts less, and a lone one counts in
full. The weight is part of the update, so `S` moves equally everywhere. Islands claim steps one round at a time, so
faster islands do more rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed

from toolkit.checkpoints.element_runs import Overlap
from toolkit.errors import LossNotFinite, RankFailed
from toolkit.recipe.batch_sections import Outer
from toolkit.run_dir.async_islands import ROUND_SAMPLES, RUN_SAMPLES, Membership
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import broadcast_object
from toolkit.runtime.engine.protocol import EvaluationSums, StepResult
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands.async_join import Claims, Joined, Limits, join
from toolkit.runtime.islands.async_store import Piece, Snapshot, Update, UpdateStore
from toolkit.runtime.islands.async_transfer import BackgroundTransfer
from toolkit.runtime.islands.checkpoint_state import AsyncIslandState
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.quantize import Encoding, ErrorFeedbackCodec
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch

POLL_SECONDS = 0.1
KEPT_UPDATES = 4
"""Newest updates of an island that stay in the store, for an island that has just joined and is about to fetch them."""
SERVE_STEPS = 5
"""Steps between two looks, within a round, for islands that wait for a snapshot to join."""


@dataclass(frozen=True)
class Waits:
    """Callbacks while an island waits."""

    tick: Callable[[], object]
    """Reports that the process is alive."""
    stopping: Callable[[], bool]
    """Whether this process was asked to stop."""


class AsyncIslandEngine:
    """`Engine` of one rank of an asynchronous island; `rounds` yields the steps that the island has claimed."""

    def __init__(
        self, inner: ReplicaEngine, mesh: Mesh, outer: Outer, membership: Membership, total_steps: int
    ) -> None:
        self._inner, self._mesh, self._membership = inner, mesh, membership
        self._island = membership.island
        self._total_steps, self._round_steps = total_steps, mesh.plan.local_steps
        self._num_rounds = -(-total_steps // self._round_steps)
        self._limits = Limits(membership.island, self._num_rounds, outer.max_staleness)
        self._clock: Clock = NoClock()
        self._is_first_rank = mesh.data == 0
        # A gloo group of its own, over host memory: the ranks of an island agree while the device computes.
        self._group = torch.distributed.new_group(backend="gloo") if mesh.plan.dp > 1 else None
        self._store = UpdateStore(membership, mesh.data, mesh.plan.dp)
        self._masters = FlatMasters(inner.state, mesh)
        self._codec = ErrorFeedbackCodec(Encoding(int(outer.bits), outer.density), self._masters.part())
        batch = mesh.plan.global_batch
        samples = {ROUND_SAMPLES: self._round_steps * batch, RUN_SAMPLES: total_steps * batch}
        self._state = AsyncIslandState(inner.state, self._masters, self._codec, samples)
        self._room = torch.empty_like(self._state.shared)
        """For the change of a round; kept, because the system takes as long to give new memory as the rest takes."""
        self._dropped: Counter[int] = Counter()
        """Island → its updates that were not applied because a check failed."""
        self._staleness = 0
        """Updates of other islands that were applied at the end of the last round."""
        self.came_too_late = False
        """Whether all steps were done before this island had joined: its own weights are not those of the run."""
        self._rounds_done = 0
        self._round = 0
        self._is_open = False
        """Whether the round was claimed but its change is not published yet."""
        self._joined: Joined
        self._claims: Claims
        self._transfer: BackgroundTransfer

    @property
    def replica(self) -> int:
        return self._mesh.data

    @property
    def loss(self) -> Loss:
        return self._inner.loss

    @property
    def state(self) -> Stateful:
        return self._state

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._inner.module

    @property
    def own_steps(self) -> int:
        """Steps that this island has done since this process started."""
        return self._rounds_done * self._round_steps

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        self._inner.watch(clock)

    def look(self, batch: Sequence[MicroBatch]) -> None:
        self._inner.look(batch)

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        return self._inner.evaluate(batch)

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(batch)
        done = int(self._inner.state.counters()["scheduler_steps"])
        if done % self._round_steps == 0 or done == self._total_steps:
            with part(self._clock, "grad_sync"):
                self._finish_round()
        elif self._is_open and done % SERVE_STEPS == 0:
            self._send_snapshots(self._agree(self._requests))
        return replace(result, exchange=self._figures())

    @torch.no_grad()
    def hand_back(self) -> None:
        """Leave: give up the round in progress, which another island does, and send what is queued. Collective."""
        if self._is_open:
            self._is_open = False
            self._masters.write(self._state.shared)
            self._agree(self._return_round)
        self._transfer.flush()

    def _return_round(self) -> None:
        self._claims.give_back(self._round)
        print(f"round {self._round} is handed back: another island does it", flush=True)

    def _figures(self) -> dict[str, float]:
        """Rounds, staleness and traffic of this island so far; updates and values of others that were not applied."""
        transfer = self._transfer
        found: dict[str, float] = {
            "island": self._island,
            "islands": sum(transfer.alive(i) for i in range(transfer.num_islands)),
            "rounds": self._rounds_done,
            "staleness": self._staleness,
            "sent_bytes": transfer.sent_bytes,
            "received_bytes": transfer.received_bytes,
            "busy_seconds": transfer.busy_seconds,
        }
        found |= {f"dropped_updates_of_{island}": count for island, count in sorted(self._dropped.items())}
        rejected = transfer.rejected() + self._store.rejected()
        return found | {f"rejected_values_of_{_name(island)}": count for island, count in sorted(rejected.items())}

    def rounds(self, waits: Waits) -> Iterator[range]:
        """Steps to train, one round at a time, until all islands together have done all, or a stop is requested."""
        self._transfer = BackgroundTransfer(
            self._membership, self._mesh.data, self._mesh.plan.dp, self._state.layout, self._codec.encoding
        )
        try:
            joined = join(self._store, self._membership, self._state, self._agree, self._all, waits.tick)
            if joined is None:
                self.came_too_late = True
                return
            self._joined = joined
            self._claims = Claims(self._store, joined, self._transfer, self._state, self._limits)
            if self._is_first_rank:
                self._store.send_beat(time.time_ns())  # alive before it claims anything
            self._transfer.start(joined.seen, joined.own_updates)
            while (number := self._next_round(waits)) is not None:
                self._round, self._is_open = number, True
                begin = number * self._round_steps
                self._inner.state.set_counters({**self._inner.state.counters(), "scheduler_steps": begin})
                yield range(begin, min(begin + self._round_steps, self._total_steps))
            while self._transfer.sending:
                time.sleep(POLL_SECONDS)
                waits.tick()
            if self._is_first_rank and self.complete:
                self._store.number("complete", 1)
        finally:
            self._transfer.flush()
            self._transfer.end()

    @property
    def complete(self) -> bool:
        """Whether all islands together have done all steps."""
        return self.came_too_late or len(self._state.completed) == self._num_rounds

    def _next_round(self, waits: Waits) -> int | None:
        """The round to do next; None if none is left or a stop was requested."""
        while True:
            found = self._agree(lambda: "stop" if waits.stopping() else self._claims.next(self._rounds_done))
            if found == "wait":
                self._transfer.hurry()
                self._merge(None)
                time.sleep(POLL_SECONDS)
                waits.tick()
                continue
            return found if isinstance(found, int) else None

    @torch.no_grad()
    def _finish_round(self) -> None:
        change = self._masters.change_since(self._state.shared, self._room)
        if not bool(torch.isfinite(change.sum())):
            raise LossNotFinite(f"island {self._island} has NaN or infinite weights; no update was published")
        self._rounds_done += 1
        self._merge(change)
        self._is_open = False

    @torch.no_grad()
    def _merge(self, own: torch.Tensor | None) -> None:
        """Apply the updates that have arrived, and publish this island's own change. Collective over the island."""
        state = self._state
        islands = self._smallest([self._transfer.num_islands])[0]  # ranks may not have heard of the newest one yet
        counts = self._smallest(self._transfer.waiting()[:islands])
        if self._limits.in_turns:
            counts = self._transfer.before(range(*self._agree(self._early_rounds)), counts)
        arrived = self._transfer.take(counts)
        updates = self._accepted(arrived)
        weight, known, requests = self._agree(lambda: self._answers(updates, publishes=own is not None))
        publishes = own is not None and weight > 0
        for update in updates:
            state.shared.sub_(self._change(update), alpha=update.weight)
            state.completed.add(update.round)
        for update in arrived:
            self._joined.add(update.island)
        if own is not None and publishes:
            content, decoded = self._codec.encoded(own)
            state.shared.sub_(decoded, alpha=weight)
            state.completed.add(self._round)
            piece = Piece(own.numel(), content)
            update = Update(self._island, self._serial(), self._round, weight, (piece,))
            self._transfer.send(partial(UpdateStore.publish, update=update, incarnation=self._joined.incarnation))
            self._transfer.sent_bytes += content.numel()
            self._staleness = sum(one.island != self._island for one in updates)
            self._joined.sent += 1
            self._joined.add(self._island)
        if own is not None or updates:
            self._masters.write(state.shared)
        self._serve_others(known, requests)

    def _early_rounds(self) -> tuple[int, int]:
        early = self._claims.too_early()
        return early.start, early.stop

    def _accepted(self, arrived: list[Update]) -> list[Update]:
        """The updates that may be applied. The others are dropped and reported; their rounds are done again.

        An update counts only if all ranks of the island accept their shards, and islands check alike, so that the
        shared weights stay equal everywhere. But an island that was away may miss what others have applied and removed.
        """
        accepted: list[Update] = []
        rounds = set(self._state.completed.beyond)
        for update in arrived:
            problem = update.problem or self._problem(update, rounds)
            if self._all(not problem):
                accepted.append(update)
                rounds.add(update.round)
                continue
            self._dropped[update.island] += 1
            if problem:
                print(f"update {update.serial} of island {update.island} is dropped: {problem}", flush=True)
            if 0 <= update.round < self._num_rounds:
                self._claims.dropped_rounds.add(update.round)
        if arrived and self._agree(lambda: self._transfer.was_away):
            if len(accepted) < len(arrived):
                what = "was away so long that updates which it misses were removed or replaced; start it again"
                raise RankFailed(f"island {self._island} {what}")
            self._transfer.was_away = False
        return accepted

    def _problem(self, update: Update, rounds: set[int]) -> str:
        """Why an update must not be applied; empty if it may."""
        if not 0 <= update.round < self._num_rounds:
            return f"round {update.round} is not one of the {self._num_rounds} rounds of the run"
        if update.round in self._state.completed or update.round in rounds:
            return f"round {update.round} is done already"
        if not 0 < update.weight <= 1:
            return f"its weight is {update.weight}; more than 0 and at most 1 is required"
        found = (self._codec.problem(piece.content, piece.size) for piece in update.pieces)
        return next((problem for problem in found if problem), "")

    def _change(self, update: Update) -> torch.Tensor:
        """The numbers of this rank's part in an update."""
        size = self._state.shared.numel()
        for piece in update.pieces:
            if piece.size == size and piece.overlaps == (Overlap(0, 0, size),):  # that rank holds the same numbers
                return self._codec.decoded(piece.content)
        change = torch.zeros_like(self._state.shared)
        for piece in update.pieces:
            piece.copy_into(change, self._codec.encoding.unpack(piece.content, piece.size))
        return change

    def _all(self, condition: bool) -> bool:
        """Whether a condition holds on all ranks of the island. Collective over the island."""
        return self._smallest([int(condition)])[0] == 1

    def _serial(self) -> int:
        return self._joined.own_updates + self._joined.sent

    def _answers(self, updates: list[Update], *, publishes: bool) -> tuple[float, int, list[int]]:
        """(weight of the own change, own updates that all others have, snapshot requests to serve).

        The weight is 0 if the change must not count: another island has redone the round. Called on the first rank.
        """
        store, own = self._store, self._island
        everyone = [i for i in range(self._transfer.num_islands) if i != own]
        others = [i for i in everyone if self._transfer.is_awaited(i)]
        behind = sum(update.island != own for update in updates)
        if self._rounds_done <= 1 or self._limits.in_turns:
            behind = max(behind, len(others))  # the others' updates of the first round, or of this turn, come later
        done = self._round in self._state.completed or any(update.round == self._round for update in updates)
        is_lost = publishes and (done or not self._claims.holds(self._round))
        if is_lost:
            print(f"round {self._round} is lost: another island did it, too", flush=True)
        rows = [store.read(f"seen/{island}") for island in everyone if self._transfer.needs_updates(island)]
        known = min([(row[own : own + 1] or [0])[0] for row in rows if row is not None], default=self._serial())
        return 0.0 if is_lost else 1 / (1 + behind), known, self._requests()

    def _requests(self) -> list[int]:
        """Requests of joining islands for a snapshot that this island serves. Called on the first rank."""
        joined, wanted = self._joined, self._transfer.num_requests
        found = [
            i
            for i in range(joined.answered, wanted)
            # The name is written just after the request is counted: without one it is somebody else's.
            if self._store.read(f"want/{i}") != self._island and self._store.first(f"served/{i}")
        ]
        joined.answered = max(joined.answered, wanted)
        return found

    def _serve_others(self, known: int, requests: list[int]) -> None:
        """Send requested snapshots, report which updates this island has, drop its updates that all others have."""
        joined = self._joined
        self._send_snapshots(requests)
        if self._is_first_rank:
            self._transfer.send(partial(UpdateStore.report_seen, seen=list(joined.seen)))
        last = min(known, self._serial() - KEPT_UPDATES)
        if last > joined.dropped:
            self._transfer.send(partial(UpdateStore.drop, serials=range(joined.dropped, last)))
            joined.dropped = last

    def _send_snapshots(self, requests: list[int]) -> None:
        """Send the shared weights, as the last round has left them, to islands that join."""
        state, joined = self._state, self._joined
        for request in requests:
            weights = state.shared.clone()  # the next round changes them while they are on their way
            snapshot = Snapshot(list(joined.seen), state.completed.counters(), weights, joined.incarnation)
            self._transfer.send(partial(UpdateStore.put_snapshot, request=request, snapshot=snapshot))

    def _smallest(self, counts: list[int]) -> list[int]:
        """The smallest of each count over the ranks of the island. Collective over the island."""
        found = torch.tensor(counts)
        if self._group is not None:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [int(count) for count in found]

    def _agree(self, ask: Callable[[], Any]) -> Any:
        """The first rank's answer, on every rank; an error there is raised on all. Collective over the island."""
        answer: dict[str, Any] = {}
        if self._is_first_rank:
            try:
                answer = {"found": ask()}
            except Exception as error:
                answer = {"error": str(error)}
        answer = broadcast_object(answer, self._group)
        if "error" in answer:
            raise RankFailed(answer["error"])
        return answer["found"]


def _name(island: int) -> str:
    """An island in the name of a figure."""
    return str(island) if island >= 0 else "nobody"
