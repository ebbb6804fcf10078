"""Two contestants without a trainer: a plain DeepSpeed loop, and nothing but the products and attention of a step.

The second one bounds what any loop can reach with the same model and kernels: it has no embedding, norms, activations,
loss, optimizer, communication or data.
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
def bound(model: Any, documents: Sequence[Sequence[int]], tokens: int, note: Note) -> None:
    """Every linear layer and the attention of every layer, forward and backward, by the kernels that are fastest here.

    Products by the faster library for this processor, attention by torch's flash kernel for CPUs, document by document.
    """
    host_matmul.switch(on=not host_matmul.why_not())
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {width: torch.randn(tokens, width) for weight in weights for width in weight.shape}
    lengths = itertools.cycle(len(document) for document in documents)
    config, longest = model.config, max(map(len, documents))
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    most = [torch.randn(1, longest, count, width).transpose(1, 2) for count in (heads, key_heads, key_heads, heads)]
    while True:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.t())
            torch.mm(inputs[weight.shape[0]], weight)
            torch.mm(inputs[weight.shape[0]].t(), inputs[weight.shape[1]])
        done = 0
        while done < tokens:
            length = next(lengths)
            done += length
            for _ in range(config.num_hidden_layers):
                _attention(*(tensor[:, :, :length] for tensor in most))
        note(done)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> None:
    """Attention of one layer in one document, forward and backward."""
    kernels = torch.ops.aten
    out, spread = kernels._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    kernels._scaled_dot_product_flash_attention_for_cpu_backward(gradient, query, key, value, out, spread, 0.0, True)
