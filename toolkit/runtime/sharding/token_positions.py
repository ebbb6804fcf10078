"""Positions of a sequence rank's tokens, for models that number the tokens they see themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Positions = Callable[[torch.Tensor], torch.Tensor]
"""Input ids of complete rows → the position of each token."""
OWN_RULE = "create_position_ids_from_input_ids"
"""RoBERTa and its kin count from the padding id on, and leave padding out (transformers 5.22.2)."""


def positions_of(model: torch.nn.Module) -> Positions:
    """How a model numbers the tokens of rows that come without position ids."""
    for module in model.modules():
        if (rule := getattr(type(module), OWN_RULE, None)) is not None:
            return functools.partial(_by_rule, rule, module)
    return _counted


def _by_rule(rule: Callable[..., torch.Tensor], module: Any, ids: torch.Tensor) -> torch.Tensor:
    return rule(ids, module.padding_idx)


def _counted(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def share_tables(model: torch.nn.Module, parts: int, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make tables that number tokens by the shape of their input (BART and its kin) return this rank's rows.

    `parts`: ranks that share a row; `own`: this rank's tokens of complete rows.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and "PositionalEmbedding" in type(module).__name__:
            table: Any = module
            table.forward = functools.partial(_own_rows, table.forward, parts, own)


def _own_rows(
    inner: Callable[..., torch.Tensor],
    parts: int,
    own: Callable[[torch.Tensor], torch.Tensor],
    given: Any,
    *args: Any,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What a table gives for complete rows, reduced to this rank's tokens. Their shape alone decides it.

    Position ids by row come with the micro-batch; those for all rows the model has counted itself.
    """
    if position_ids is not None and position_ids.dim() > 1:
        return inner(given, *args, position_ids=position_ids, **kwargs)
    if position_ids is not None:
        counted = torch.arange(len(position_ids) * parts, device=position_ids.device)
        table = inner(given, *args, position_ids=counted, **kwargs)
    else:
        rows, tokens = given.shape[:2] if torch.is_tensor(given) else given[:2]
        complete = (rows, tokens * parts)
        table = inner(given.new_zeros(complete) if torch.is_tensor(given) else complete, *args, **kwargs)
    return own(table) if table.dim() == 3 else own(table[None])[0]
