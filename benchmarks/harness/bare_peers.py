"""Two contestants without a trainer: a plain DeepSpeed loop, and nothing but the matrix products of a step.

The second one bounds what any loop can reach with the same model: it has no attention, norms, loss, optimizer,
communication or data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toolkit.runtime.machine import host_matmul

Note = Callable[[int], object]
"""Called after every step with the useful tokens of this process."""


def plain_deepspeed(
    model: torch.nn.Module,
    documents: Sequence[Sequence[int]],
    config: dict[str, Any],
    shape: tuple[int, int],
    note: Note,
) -> None:
    """Train on one stream of text, cut into full rows, as a DeepSpeed tutorial does. `shape`: rows and tokens."""
    import deepspeed
    import torch.distributed

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    own = _batches(documents, *shape, torch.distributed.get_rank(), torch.distributed.get_world_size())
    for rows in own:
        loss = engine(input_ids=rows, labels=rows, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        note(shape[0] * (shape[1] - 1))  # the first token of a row is predicted by nobody


def _batches(
    documents: Sequence[Sequence[int]], rows: int, tokens: int, rank: int, ranks: int
) -> Iterator[torch.Tensor]:
    """This process's share of the stream, again and again."""
    stream = torch.tensor(list(itertools.chain.from_iterable(documents)))
    size = rows * tokens
    batches = stream[: len(stream) // (size * ranks) * size * ranks].view(-1, ranks, rows, tokens)
    while True:
        yield from batches[:, rank]


@torch.no_grad()
def products(model: torch.nn.Module, tokens: int, note: Note) -> None:
    """Forward, and gradients of inputs and weights, of every linear layer, by the faster library for this processor."""
    host_matmul.switch(on=not host_matmul.why_not())
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {width: torch.randn(tokens, width) for weight in weights for width in weight.shape}
    while True:
        for weight in weights:
            given, gradient = inputs[weight.shape[1]], inputs[weight.shape[0]]
            given @ weight.t()
        for weight in reversed(weights):
            given, gradient = inputs[weight.shape[1]], inputs[weight.shape[0]]
            gradient @ weight
            gradient.t() @ given
        note(tokens)
