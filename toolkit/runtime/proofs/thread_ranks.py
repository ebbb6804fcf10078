"""Ranks as threads of one process, so that a split can be proven without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.runtime.mixtures.expert_exchange import ExpertGroup
from toolkit.runtime.sharding.ring import RingGroup
from toolkit.runtime.sharding.ulysses import SequenceGroup


class ThreadGroup(SequenceGroup):
    """Tensor or sequence ranks as threads of one process."""

    def __init__(self, index: int, ranks: int, barrier: threading.Barrier, board: list[Any]) -> None:
        super().__init__(None, index, ranks)
        self._barrier = barrier
        self._board = board

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor)).sum(0)

    def sum_into(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.sum(tensor))

    def start_sum(self, tensor: torch.Tensor) -> Any:
        self.sum_into(tensor)
        return _done()

    def start_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return torch.stack(self.gather(tensor)), _done()

    def start_scatter(self, stacked: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.sum(stacked)[self.index].clone(), _done()

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor)).amax(0)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.index] = tensor.detach()
        self._barrier.wait()
        parts = [part.clone() for part in self._board]
        self._barrier.wait()
        return parts

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[self.index] for part in self.gather(tensor)])

    def give_up(self) -> None:
        """Make the waiting threads fail too."""
        self._barrier.abort()


def _done() -> Any:
    """What is waited for where a collective is done already."""
    done: Any = torch.futures.Future()
    done.set_result(None)
    return done


class ThreadRing(RingGroup):
    """Ring ranks as threads of one process."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(None, group.index, range(group.ranks))
        self.group = group

    def start(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        return self.group.gather(tensor)[self.index - 1], []


def thread_groups(ranks: int) -> list[ThreadGroup]:
    """One group object per thread."""
    barrier, board = threading.Barrier(ranks), [None] * ranks
    return [ThreadGroup(index, ranks, barrier, board) for index in range(ranks)]


class ThreadExpertGroup(ExpertGroup):
    """Expert ranks as threads of one process."""

    def __init__(self, threads: ThreadGroup) -> None:
        super().__init__(None, threads.index, threads.ranks)
        self._threads = threads

    def swap(self, counts: torch.Tensor) -> torch.Tensor:
        return self._threads.exchange(counts)

    def start(self, rows: torch.Tensor, into: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Any:
        sizes = self._threads.gather(torch.tensor(list(sent)))
        parts = self._threads.gather(rows)
        own = [torch.split(part, size.tolist())[self.index] for part, size in zip(parts, sizes, strict=True)]
        assert [len(part) for part in own] == list(received), "every rank announces what it sends"
        into.copy_(torch.cat(own))
        return _done()
