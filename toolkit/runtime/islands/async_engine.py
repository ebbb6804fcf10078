"""An island that never waits for the others: what it learns goes out by letter, what they learn comes in.

All islands share `S`. A round starts at `S`; at its end an island takes what has arrived, and `S` moves by its own
change and by theirs. A change counts by `1 / (1 + n)`, `n` being the changes of others since the round began: equal
islands count alike, one that lags counts less, and one that is alone counts in full. The weight travels with the
letter, so that `S` moves alike everywhere. Steps are claimed a round (a chunk) at a time: whoever is faster does more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed

from toolkit.errors import LossNotFinite, RankFailed
from toolkit.recipe.batch_sections import Outer
from toolkit.run_dir.async_islands import Membership
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import broadcast_object
from toolkit.runtime.engine.protocol import EvaluationSums, StepResult
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands.async_join import Joined, join
from toolkit.runtime.islands.async_store import Snapshot, Update, UpdateStore
from toolkit.runtime.islands.async_transfer import BackgroundTransfer
from toolkit.runtime.islands.checkpoint_state import AsyncIslandState
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.quantize import ErrorFeedbackCodec
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.models.micro_batch import MicroBatch

POLL_SECONDS = 0.1
KEPT_LETTERS = 4
"""Of each island, for one that has just come in and is about to fetch them."""
T = TypeVar("T")


@dataclass(frozen=True)
class Waits:
    """What an island does while it waits."""

    tick: Callable[[], object]
    """It lives."""
    stopping: Callable[[], bool]
    """Whether this process was asked to stop."""


class AsyncIslandEngine:
    """`Engine` of one rank of such an island; `rounds` says which steps are its own."""

    def __init__(self, inner: ReplicaEngine, mesh: Mesh, outer: Outer, member: Membership, total_steps: int) -> None:
        self._inner, self._mesh, self._outer, self._member = inner, mesh, outer, member
        self._total_steps, self._steps = total_steps, mesh.plan.local_steps
        self._all_chunks = -(-total_steps // self._steps)
        self._clock: Clock = NoClock()
        self._first = mesh.data == 0
        # Of its own, over host memory: agreements of an island's ranks.
        self._group = torch.distributed.new_group(backend="gloo") if mesh.plan.dp > 1 else None
        self._mailbox = UpdateStore(member, mesh.data, mesh.plan.dp)
        self._masters = FlatMasters(inner.state, mesh)
        self._wire = ErrorFeedbackCodec(outer.bits, self._masters.part())
        self._state = AsyncIslandState(inner.state, self._masters, self._wire)
        self._over = False
        self._rounds = 0
        self._chunk = 0
        self._joined: Joined
        self._postman: BackgroundTransfer

    @property
    def replica(self) -> int:
        return self._mesh.data

    @property
    def state(self) -> Stateful:
        return self._state

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._inner.module

    @property
    def own_steps(self) -> int:
        """Steps that this island has done in this life."""
        return self._rounds * self._steps

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        self._inner.watch(clock)

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        return self._inner.evaluate(batch)

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(batch)
        done = int(self._inner.state.counters()["scheduler_steps"])
        if done % self._steps == 0 or done == self._total_steps:
            with part(self._clock, "grad_sync"):
                self._finish_round()
        return result

    def rounds(self, waits: Waits) -> Iterator[range]:
        """Steps to do, a round at a time, until all islands together have done all; nothing if asked to stop."""
        joined = join(self._mailbox, self._member, self._state, self._agree, waits.tick)
        if joined is None:
            self._over = True
            return
        self._joined = joined
        if self._first:
            self._mailbox.number(f"beat/{self._member.island}", 1)  # before it claims anything
        own = joined.own_letters
        self._postman = BackgroundTransfer(self._member, self._mesh.data, self._mesh.plan.dp, joined.seen, own_from=own)
        try:
            while (chunk := self._next(waits)) is not None:
                self._chunk = chunk
                begin = chunk * self._steps
                self._inner.state.set_counters({**self._inner.state.counters(), "scheduler_steps": begin})
                yield range(begin, min(begin + self._steps, self._total_steps))
            while self._postman.sending:
                time.sleep(POLL_SECONDS)
                waits.tick()
            self._tell_complete()
        finally:
            self._postman.flush()
            self._postman.end()

    @property
    def complete(self) -> bool:
        """Whether all islands together have done all."""
        return self._over or len(self._state.chunks) == self._all_chunks

    def _tell_complete(self) -> None:
        if self._first and self.complete:
            self._mailbox.number("complete", 1)

    def _next(self, waits: Waits) -> int | None:
        """The chunk to do; None: there is none left, or the run was asked to stop."""
        while True:
            found = self._agree(lambda: "stop" if waits.stopping() else self._claim())
            if found == "wait":
                self._merge(None)
                time.sleep(POLL_SECONDS)
                waits.tick()
                continue
            return found if isinstance(found, int) else None

    def _claim(self) -> int | str:
        """Asked on the first rank."""
        mailbox, own, chunks = self._mailbox, self._member.island, self._state.chunks
        if self._joined.seen[own] < self._joined.own_letters or self._too_far_ahead():
            return "wait"
        if len(chunks) == self._all_chunks:
            return "end"
        before = mailbox.read(f"open/{own}")
        if self._rounds == 0 and before is not None and self._take_over(before):
            return int(before)  # of an earlier life
        if mailbox.number("redo/taken") < mailbox.number("redo/count"):
            chunk = int(mailbox.read(f"redo/{mailbox.number('redo/taken', 1) - 1}"))
        else:
            chunk = mailbox.number("next", 1) - 1
        if chunk >= self._all_chunks:
            chunk = next((left for left in self._orphans() if self._take_over(left)), -1)
        if chunk < 0:
            return "wait"
        mailbox.write(f"base/{own}", self._letters())
        mailbox.write(f"open/{own}", chunk)
        return chunk

    def _take_over(self, chunk: int) -> bool:
        """Whether this island is the one to do again what an earlier life, or an island that has left, did not end."""
        taker = self._mailbox.read(f"taker/{chunk}")
        taken = taker is not None and taker[0] != self._member.island and self._postman.alive(taker[0])
        if chunk in self._state.chunks or taken or not self._mailbox.first(f"again/{chunk}/{taker}"):
            return False
        self._mailbox.write(f"taker/{chunk}", self._self)
        return True

    @property
    def _self(self) -> list[int]:
        return [self._member.island, self._joined.life]

    def _orphans(self) -> list[int]:
        """Chunks of islands that have left."""
        others = [island for island in range(self._member.islands) if island != self._member.island]
        left = [i for i in others if self._postman.has_left(i, self._mailbox.number(f"beat/{i}"))]
        found = [self._mailbox.read(f"open/{island}") for island in left]
        return [int(chunk) for chunk in found if chunk is not None and chunk not in self._state.chunks]

    def _letters(self) -> int:
        return sum(self._mailbox.letters(island) for island in range(self._member.islands))

    def _too_far_ahead(self) -> bool:
        """Whether an island that lives would miss more rounds than is allowed."""
        for island in range(self._member.islands):
            if island == self._member.island or not self._postman.alive(island):
                continue
            chunk = self._mailbox.read(f"open/{island}")
            base = self._mailbox.read(f"base/{island}", 0)
            at_work = chunk is not None and chunk not in self._state.chunks
            if at_work and self._letters() - base >= self._outer.max_staleness:
                return True
        return False

    @torch.no_grad()
    def _finish_round(self) -> None:
        change = self._state.shared - self._masters.part()
        if not bool(torch.isfinite(change).all()):
            raise LossNotFinite(f"island {self._member.island} has weights that are no numbers; nothing was sent")
        self._rounds += 1
        self._merge(change)

    @torch.no_grad()
    def _merge(self, own: torch.Tensor | None) -> None:
        """Take what has arrived, and send what was learned. Collective over the island."""
        state, seen = self._state, self._joined.seen
        letters = self._postman.take(self._common(self._postman.waiting()))
        weight, known, requests = self._agree(lambda: self._answers(letters, sends=own is not None))
        shared = state.shared
        for letter in letters:
            shared = shared - letter.weight * self._wire.unpack(letter.content)
            state.chunks.add(letter.chunk)
            seen[letter.island] += 1
        if own is not None:
            content = self._wire.pack(own)
            shared = shared - weight * self._wire.unpack(content)
            state.chunks.add(self._chunk)
            letter = Update(self._member.island, self._serial(), self._chunk, weight, content)
            self._postman.send(partial(UpdateStore.post, letter=letter, life=self._joined.life))
            self._joined.sent += 1
            seen[self._member.island] += 1
        if own is not None or letters:
            state.shared = shared
            self._masters.write(shared)
        self._keep_house(known, requests)

    def _serial(self) -> int:
        return self._joined.own_letters + self._joined.sent

    def _answers(self, letters: list[Update], *, sends: bool) -> tuple[float, int, list[int]]:
        """Asked on the first rank: a change's weight, own letters that all others have, and who wants a snapshot."""
        mailbox, own = self._mailbox, self._member.island
        others = [i for i in range(self._member.islands) if i != own and self._postman.alive(i)]
        behind = sum(letter.island != own for letter in letters)
        if self._rounds <= 1:
            behind = max(behind, len(others))  # their first letters are not here yet
        if sends and mailbox.read(f"taker/{self._chunk}", self._self) != self._self:
            raise RankFailed(f"island {own} was away for so long that others have done its round; start it again")
        seen = [mailbox.read(f"seen/{island}") for island in others]
        known = min([row[own] for row in seen if row], default=self._serial())
        wanted = mailbox.number("want/count")
        requests = [
            i
            for i in range(self._joined.answered, wanted)
            if mailbox.read(f"want/{i}", own) != own and mailbox.first(f"want/{i}/served")
        ]
        self._joined.answered = wanted
        return 1 / (1 + behind), known, requests

    def _keep_house(self, known: int, requests: list[int]) -> None:
        state, joined = self._state, self._joined
        for request in requests:
            snapshot = Snapshot(list(joined.seen), state.chunks.counters(), state.shared.view(torch.uint8))
            self._postman.send(partial(UpdateStore.give, request=request, snapshot=snapshot))
        if self._first:
            self._mailbox.write(f"seen/{self._member.island}", joined.seen)
        last = min(known, self._serial() - KEPT_LETTERS)
        if last > joined.dropped:
            self._postman.send(partial(UpdateStore.drop, serials=range(joined.dropped, last)))
            joined.dropped = last

    def _common(self, counts: list[int]) -> list[int]:
        """What every rank of the island has."""
        found = torch.tensor(counts)
        if self._group is not None:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [int(count) for count in found]

    def _agree(self, ask: Callable[[], Any]) -> Any:
        """The first rank's answer, on every rank; what goes wrong there is raised on all."""
        answer: Any = None
        if self._first:
            try:
                answer = ask()
            except Exception as error:
                answer = RankFailed(str(error)) if not isinstance(error, RankFailed) else error
        answer = broadcast_object(answer, self._group)
        if isinstance(answer, RankFailed):
            raise answer
        return answer
