"""Which samples a step was trained on, as the ranks themselves tell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from toolkit.runtime.data.sample_order import PAST_END
from toolkit.runtime.distributed.process_group import gather_objects


def taken(own: np.ndarray, replica: int, group: Any = None) -> list[int]:
    """Sample ids of a step over all replicas, in the order of the replicas. Collective."""
    return joined(gather_objects((replica, own.tolist()), group))


def joined(told: Iterable[tuple[int, list[int]]]) -> list[int]:
    """What each replica took, one behind the other; ranks of one replica must have taken the same."""
    by_replica: dict[int, list[int]] = {}
    for rank, (replica, ids) in enumerate(told):
        if by_replica.setdefault(replica, ids) != ids:
            raise RuntimeError(
                f"rank {rank} of replica {replica} took samples {ids}, the other ranks of the replica took "
                f"{by_replica[replica]}"
            )
    return [i for replica in sorted(by_replica) for i in by_replica[replica] if i != PAST_END]
