"""Proof of a split on a tiny model: in float64 and one process, compared with the unsplit model.

Tensor ranks are threads and pipeline stages run one after another, so only the split itself is tested. A correct split
agrees with the unsplit model up to rounding; a wrong one is reported with the parameters whose gradients differ.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.errors import first_line
from toolkit.plans.pipeline_bounds import even_bounds
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Model
from toolkit.runtime.mixtures.expert_dispatch import ExpertsRefused, distribute, find_experts
from toolkit.runtime.mixtures.expert_shards import cut_experts
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import (
    SplitRefused,
    emptied,
    fill,
    hollow_model,
    skeleton,
    unadapted,
)
from toolkit.runtime.models.first_weights import ADAPTED
from toolkit.runtime.models.loss import Loss, summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import Layout, holds_experts, layout_of
from toolkit.runtime.pipeline.split import StageSplit, analyse, layer_lists
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.pipeline.weight_gradients import WeightGradients
from toolkit.runtime.proofs.thread_ranks import ThreadExpertGroup, ThreadGroup, ThreadRing, thread_groups
from toolkit.runtime.proofs.unsplit import SEED, Gradients, Unsplit, exact, tiny_heads, tiny_model_section, unsplit
from toolkit.runtime.sharding import complete_texts
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.complete_texts import Slice
from toolkit.runtime.sharding.shard_model import shard, sum_partial_gradients
from toolkit.runtime.sharding.ulysses import SequenceRefused, SequenceShare
from toolkit.verdicts import Verdict

TOLERANCE = 1e-4
"""Limit of a gradient's relative error: far above rounding, even if a model casts to fp32 inside."""
FLOOR = 1e-6
"""Gradients below this fraction of the global norm are rounding errors themselves."""
ALL = (0, 0)
"""All stages and the only micro-batch, where stages run one after another."""


def _places(axes: Axes) -> list[tuple[ThreadGroup, ThreadGroup, ThreadGroup]]:
    """For each rank its tensor group, the group that it exchanges heads with, and its ring."""
    found = []
    rings = [[thread_groups(axes.cp) for _ in range(axes.sp)] for _ in range(axes.tp)]
    for context in range(axes.cp):
        exchanges = [thread_groups(axes.sp) for _ in range(axes.tp)]
        for ulysses in range(axes.sp):
            for tensor in thread_groups(axes.tp):
                ring = rings[tensor.index][ulysses][context]
                found.append((tensor, exchanges[tensor.index][ulysses], ring))
    return found


def prove_all(section: Model, splits: Sequence[Axes]) -> list[Verdict]:
    """Verdicts on several splits of a model; those with a tiny model of the same size share the unsplit one."""
    wholes: dict[int, Unsplit | Verdict] = {}
    for axes in splits:
        if (heads := tiny_heads(axes)) not in wholes:
            wholes[heads] = _whole(tiny_model_section(section, axes))
    return [_verdict(wholes[tiny_heads(axes)], axes) for axes in splits]


def prove(section: Model, axes: Axes) -> Verdict:
    """Verdict on a plan's tensor, pipeline and sequence axes for the recipe's model."""
    return prove_all(section, [axes])[0]


def _whole(tiny: Model) -> Unsplit | Verdict:
    """The unsplit model, or why it is none to compare with."""
    try:
        return unsplit(tiny)
    except Exception as error:
        name = (tiny.config or {})["model_type"]
        return Verdict(False, f"a tiny {name} model does not train in one process: {first_line(error)}")


def _verdict(whole: Unsplit | Verdict, axes: Axes) -> Verdict:
    if isinstance(whole, Verdict):
        return whole
    try:
        if axes.ep > 1 and not (verdict := _compare_experts(whole, axes.ep)).ok:
            return verdict
        return _compare(whole, axes) if axes.tp * axes.pp * axes.sp * axes.cp > 1 else Verdict(True)
    except (SplitRefused, SequenceRefused, ExpertsRefused) as error:
        return Verdict(False, first_line(error))
    except Exception as error:
        return Verdict(False, f"the split fails on a tiny model: {type(error).__name__}: {first_line(error)}")


def _compare(whole: Unsplit, axes: Axes) -> Verdict:
    if axes.pp == 1:
        return _compare_split(whole, axes, None)
    for bounds in _bounds(whole.tiny, axes.pp):
        split = analyse(emptied(hollow_model(whole.tiny, SEED)), bounds)
        if not (verdict := _compare_split(whole, axes, split)).ok:
            return verdict
    return Verdict(True)


def _compare_split(whole: Unsplit, axes: Axes, split: StageSplit | None) -> Verdict:
    by_tokens, groups = axes.sp * axes.cp > 1, _places(axes)
    parts = [_part(whole, group[0] if axes.tp > 1 else None, split, axes) for group in groups]
    if axes.weights_later:
        parts = [replace(part, later=WeightGradients(torch.nn.ModuleList(part.pieces))) for part in parts]
    own: list[Slice | None] = [
        _slice(whole.tiny, part.models, *group[1:]) if by_tokens else None
        for part, group in zip(parts, groups, strict=True)
    ]
    for micro, loss, gradients in zip(whole.batches, whole.losses, whole.gradients, strict=True):
        for model in (model for part in parts for model in part.models):
            model.zero_grad(set_to_none=True)
        with ThreadPoolExecutor(len(groups)) as pool:
            runs = [pool.submit(_run, *each, micro) for each in zip(parts, own, groups, strict=True)]
            errors = [error for run in runs if (error := run.exception()) is not None]
            if errors:  # ranks that waited for the one that failed have broken barriers
                raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
            losses = [run.result() for run in runs]
        found = sum(losses[:: axes.tp])
        padded = " on padded data" if micro.attention_mask is not None else ""
        if abs(found - loss) > TOLERANCE * abs(loss):
            return Verdict(False, f"the loss{padded} of a tiny model is {found:.6f}; unsplit it is {loss:.6f}")
        together = [[piece for part in parts[first :: axes.tp] for piece in part.pieces] for first in range(axes.tp)]
        wrong = sorted({name for pieces in together for name in _wrong(pieces, gradients)})
        if wrong:
            names = ", ".join(wrong[:3])
            return Verdict(
                False, f"gradients{padded} of {len(wrong)} parameters of a tiny model are wrong, first {names}"
            )
    return Verdict(True)


def _compare_experts(whole: Unsplit, ranks: int) -> Verdict:
    """Each rank routes its own row of a batch; together they must have the loss and gradients of all rows."""
    for micro, loss, gradients in zip(whole.batches, whole.losses, whole.gradients, strict=True):
        groups = thread_groups(ranks)
        parts = [_expert_part(whole, group) for group in groups]
        rows = [micro.map(lambda tensor, row=group.index: tensor[row : row + 1]) for group in groups]  # type: ignore[misc]
        with ThreadPoolExecutor(ranks) as pool:
            runs = [
                pool.submit(_run, *each)
                for each in zip(parts, [None] * ranks, [(group,) for group in groups], rows, strict=True)
            ]
            found = sum(run.result() for run in runs)
        padded = " on padded data" if micro.attention_mask is not None else ""
        if abs(found - loss) > TOLERANCE * abs(loss):
            what = f"the loss{padded} of a tiny model with experts on {ranks} ranks is {found:.6f}"
            return Verdict(False, f"{what}; unsplit it is {loss:.6f}")
        models = [part.pieces[0] for part in parts]
        wrong = sorted({name for own in models for name in _wrong_experts(own, models, gradients)})
        if wrong:
            what = f"gradients{padded} of {len(wrong)} parameters of a tiny model with distributed experts are wrong"
            return Verdict(False, f"{what}, first {', '.join(wrong[:3])}")
    return Verdict(True)


def _expert_part(whole: Unsplit, group: ThreadGroup) -> _Part:
    model = emptied(hollow_model(whole.tiny, SEED))
    experts = find_experts(unadapted(model, whole.tiny))
    cut_experts(model, experts, group.index, group.ranks)
    fill(model, whole.weights)
    distribute(experts, ThreadExpertGroup(group))
    return _Part([_finished(model, None, whole.kind)])


def _wrong_experts(own: Any, models: Sequence[Any], expected: Gradients) -> list[str]:
    """Parameters of a rank whose gradients are wrong: those of experts are complete, others summed over ranks."""
    named = dict(own.named_parameters())
    every = [dict(model.named_parameters()) for model in models]
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    wrong = []
    for name, gradient in expected.items():
        parameter = named[name]
        parts = [parameter.grad] if holds_experts(parameter) else [others[name].grad for others in every]
        given = [part for part in parts if part is not None]
        found = torch.stack(given).sum(0) if given else None
        wrong += [name] if _differs(gradient, layout_of(parameter), found, norm) else []
    return wrong


def _slice(tiny: Model, models: Sequence[PreTrainedModel], group: ThreadGroup, ring: ThreadGroup) -> Slice:
    share = SequenceShare(group, ThreadRing(ring) if ring.ranks > 1 else None, in_turn=len(models) == 1)
    return complete_texts.install(share, group, tiny, models)


@dataclass(frozen=True)
class _Part:
    """One tensor rank's part of the model."""

    pieces: list[Any]
    """Its stages, or the model if there is only one stage."""
    loss: Loss = summed_loss
    later: WeightGradients | None = None
    """Gradients of weights that are computed after those of inputs."""
    sends_alike: bool = False
    """Whether tensor ranks send the same values to the next stage, of which each sends a share."""

    @property
    def models(self) -> list[PreTrainedModel]:
        """The models of its pieces."""
        return [piece.model if isinstance(piece, Stage) else piece for piece in self.pieces]


def _bounds(tiny: Model, pp: int) -> list[tuple[int, ...]]:
    """Bounds of stages to prove.

    Of an encoder-decoder all kinds of boundaries: in the encoder, after it, in the decoder, and a stage with the end of
    one and the beginning of the other.
    """
    lengths = [len(layers) for layers in layer_lists(skeleton(tiny)).values()]
    encoder, layers = lengths[0], sum(lengths)
    if encoder == layers:
        return [even_bounds(layers, pp)]
    first, last = encoder // 2, (encoder + layers) // 2
    return [(0, first, encoder, last, layers), (0, first, last, layers)]


def _part(whole: Unsplit, group: TensorGroup | None, split: StageSplit | None, axes: Axes) -> _Part:
    tiny, sliced = whole.tiny, group is not None and whole.sliced_logits
    cut = partial(_cut, tiny, shares_tokens=axes.sequence_sharded, sliced_logits=sliced)
    if split is None:
        model = emptied(hollow_model(tiny, SEED))
        loss = cut(model, group)
        fill(model, whole.weights)
        return _Part([_finished(model, group, whole.kind)], loss)
    stages = []
    for index in range(split.stages):
        model = emptied(hollow_model(tiny, SEED))
        owned = _owned_by(split.owners, index, ADAPTED if tiny.lora else "")
        loss = cut(model, group, owned)
        stage = Stage(model, split, index, whole.kind, loss)
        stage.parameters_by_name = fill(model, whole.weights, stage.parameters_by_name)
        _finished(model, group, whole.kind)
        stages.append(stage)
    return _Part(stages, sends_alike=group is not None and not axes.sequence_sharded)


def _owned_by(owners: Any, stage: int, prefix: str) -> Callable[[str], bool]:
    return lambda name: stage in owners[prefix + name]


def _cut(
    tiny: Model,
    model: Any,
    group: TensorGroup | None,
    owned: Callable[[str], bool] = lambda name: True,
    *,
    shares_tokens: bool,
    sliced_logits: bool,
) -> Loss:
    """Reduce a tiny model to a tensor rank's shards, if there are several; return the loss for its logits."""
    if group is None:
        return summed_loss
    plain = skeleton(tiny) if tiny.lora else None
    base = unadapted(model, tiny)
    return shard(base, group, owned, sliced_logits=sliced_logits, plain=plain, shares_tokens=shares_tokens)


def _finished(model: PreTrainedModel, group: TensorGroup | None, kind: torch.dtype) -> PreTrainedModel:
    exact(model, kind)
    if group:
        sum_partial_gradients(model, group)
    return model


def _run(part: _Part, own: Slice | None, groups: Sequence[ThreadGroup], micro: MicroBatch) -> float:
    try:
        micro = own(micro) if own else micro
        if not isinstance(part.pieces[0], Stage):
            loss = part.loss(forward(part.pieces[0], micro).logits.double(), micro.labels)
        else:
            value: Any = None
            for stage in part.pieces:
                stage.feed([micro], 1.0)
                value = stage(value)
                if part.sends_alike:
                    _check_alike(value, groups[0])
            loss = value
        with part.later.collecting(ALL) if part.later else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        if part.later:
            part.later.compute(ALL)
        return float(loss.detach())
    except BaseException:
        for group in groups:
            group.give_up()
        raise


def _check_alike(value: Any, group: ThreadGroup) -> None:
    """Raise if tensor ranks have different values for the next stage, which gets a share of them from each rank."""
    for tensor in value if isinstance(value, tuple) else (value,):
        own, *others = group.gather(tensor.double())
        if any(float((own - other).norm()) > TOLERANCE * float(own.norm()) for other in others):
            raise SplitRefused("tensor ranks have different values where a stage ends, and would each send a share")


def _wrong(parts: Sequence[Any], expected: Gradients) -> list[str]:
    """Parameters of one tensor rank whose gradients differ from those of the unsplit model."""
    found: dict[str, torch.Tensor] = {}
    layouts: dict[str, Layout | None] = {}
    for part in parts:
        named = part.parameters_by_name if isinstance(part, Stage) else dict(part.named_parameters())
        for name, parameter in named.items():
            layouts[name] = layout_of(parameter)
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    return [
        name for name, g in expected.items() if name in layouts and _differs(g, layouts[name], found.get(name), norm)
    ]


def _differs(whole: torch.Tensor, layout: Layout | None, found: torch.Tensor | None, norm: float) -> bool:
    piece = layout.slice_of(whole) if layout else whole
    difference = float((piece - found).norm()) if found is not None else float(piece.norm())
    return not difference <= TOLERANCE * float(piece.norm()) + FLOOR * norm
