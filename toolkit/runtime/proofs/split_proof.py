"""Proof of a split on a tiny model: in float64 and one process, compared with the unsplit model.

Tensor ranks are threads and pipeline stages run one after another, so only the split itself is tested. A correct split
agrees with the unsplit model up to rounding; a wrong one is reported with the parameters whose gradients differ.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
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
from toolkit.runtime.models.attention import forward, without_gpu
from toolkit.runtime.models.build import (
    SplitRefused,
    build_model,
    emptied,
    fill,
    find_layers,
    hollow_model,
    load_config,
    skeleton,
    unadapted,
    weights_of,
)
from toolkit.runtime.models.first_weights import ADAPTED
from toolkit.runtime.models.loss import Loss, summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import Layout, holds_experts, layout_of
from toolkit.runtime.models.tiny_models import Sizes, probe_batches, tiny_config
from toolkit.runtime.pipeline.split import analyse
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.pipeline.weight_gradients import WeightGradients
from toolkit.runtime.proofs.thread_ranks import ThreadExpertGroup, ThreadGroup, ThreadRing, thread_groups
from toolkit.runtime.sharding import complete_texts
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.complete_texts import Slice
from toolkit.runtime.sharding.shard_model import shard, sum_partial_gradients
from toolkit.runtime.sharding.ulysses import SequenceRefused, SequenceShare
from toolkit.runtime.sharding.vocab_parallel_loss import follows_head
from toolkit.verdicts import Verdict

TOLERANCE = 1e-4
"""Limit of a gradient's relative error: far above rounding, even if a model casts to fp32 inside."""
FLOOR = 1e-6
"""Gradients below this fraction of the global norm are rounding errors themselves."""
SEED = 0
ALL = (0, 0)
"""All stages and the only micro-batch, where stages run one after another."""
RANK = 4
"""Largest rank of a tiny model's adapters."""


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


def tiny_model_section(section: Model, axes: Axes) -> Model:
    """A tiny model of the same type and switches, with enough heads for all ranks."""
    heads = max(4, 2 * axes.tp, axes.sp)
    config = tiny_config(load_config(section), Sizes(heads=heads))
    return Model(
        config=config,
        init="scratch",
        precision="fp32",
        attention=without_gpu(section.attention),
        task=section.task,
        num_labels=section.num_labels and max(section.num_labels, 2),  # of one class the loss would always be 0
        lora=section.lora
        and replace(section.lora, rank=min(section.lora.rank, RANK), dropout=0.0, quantize="none", start="zero"),
    )


def prove_all(section: Model, splits: Sequence[Axes]) -> list[Verdict]:
    """Verdicts on several splits of a model."""
    return [prove(section, axes) for axes in splits]


def prove(section: Model, axes: Axes) -> Verdict:
    """Verdict on a plan's tensor, pipeline and sequence axes for the recipe's model."""
    tiny = tiny_model_section(section, axes)
    try:
        kind, expected = _first_that_trains(tiny)
    except Exception as error:
        name = (tiny.config or {})["model_type"]
        return Verdict(False, f"a tiny {name} model does not train in one process: {first_line(error)}")
    try:
        if axes.ep > 1 and not (verdict := _compare_experts(tiny, axes.ep, kind, expected)).ok:
            return verdict
        return _compare(tiny, axes, kind, expected) if axes.tp * axes.pp * axes.sp * axes.cp > 1 else Verdict(True)
    except (SplitRefused, SequenceRefused, ExpertsRefused) as error:
        return Verdict(False, first_line(error))
    except Exception as error:
        return Verdict(False, f"the split fails on a tiny model: {type(error).__name__}: {first_line(error)}")


Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Expected:
    """Losses and gradients of the unsplit model, by batch."""

    batches: list[MicroBatch]
    losses: list[float]
    gradients: list[Gradients]


def _first_that_trains(tiny: Model) -> tuple[torch.dtype, _Expected]:
    """In float64; in float32 for types whose code mixes in fp32 constants and fails in float64 (xglm)."""
    try:
        return torch.float64, _whole(tiny, torch.float64)
    except Exception:
        return torch.float32, _whole(tiny, torch.float32)


def _whole(tiny: Model, kind: torch.dtype) -> _Expected:
    used, losses, gradients = [], [], []
    model = _exact(_stirred(build_model(tiny, SEED)), kind)
    for batch in probe_batches(tiny.task, load_config(tiny)):
        micro = batch.map(lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)
        model.zero_grad(set_to_none=True)
        try:
            loss = summed_loss(forward(model, micro).logits.double(), micro.labels)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception:
            if micro.attention_mask is None:
                raise
            continue  # this type accepts no mask, so it is never trained on padded data
        used.append(micro)
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return _Expected(used, losses, gradients)


def _compare(tiny: Model, axes: Axes, kind: torch.dtype, expected: _Expected) -> Verdict:
    by_tokens, groups = axes.sp * axes.cp > 1, _places(axes)
    sliced = axes.tp > 1 and follows_head(tiny)
    parts = [_part(tiny, group[0] if axes.tp > 1 else None, axes, kind, sliced_logits=sliced) for group in groups]
    if axes.weights_later:
        parts = [replace(part, later=WeightGradients(torch.nn.ModuleList(part.pieces))) for part in parts]
    own: list[Slice | None] = [
        _slice(tiny, part.models, *group[1:]) if by_tokens else None for part, group in zip(parts, groups, strict=True)
    ]
    for micro, loss, gradients in zip(expected.batches, expected.losses, expected.gradients, strict=True):
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


def _compare_experts(tiny: Model, ranks: int, kind: torch.dtype, expected: _Expected) -> Verdict:
    """Each rank routes its own row of a batch; together they must have the loss and gradients of all rows."""
    for micro, loss, gradients in zip(expected.batches, expected.losses, expected.gradients, strict=True):
        groups = thread_groups(ranks)
        parts = [_expert_part(tiny, group, kind) for group in groups]
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


def _expert_part(tiny: Model, group: ThreadGroup, kind: torch.dtype) -> _Part:
    weights = weights_of(_stirred(hollow_model(tiny, SEED)), tiny, SEED)
    model = emptied(hollow_model(tiny, SEED))
    experts = find_experts(unadapted(model, tiny))
    cut_experts(model, experts, group.index, group.ranks)
    fill(model, weights)
    distribute(experts, ThreadExpertGroup(group))
    return _Part([_finished(model, None, kind)])


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

    @property
    def models(self) -> list[PreTrainedModel]:
        """The models of its pieces."""
        return [piece.model if isinstance(piece, Stage) else piece for piece in self.pieces]


def _part(tiny: Model, group: TensorGroup | None, axes: Axes, kind: torch.dtype, *, sliced_logits: bool) -> _Part:
    pp, cut = axes.pp, partial(_cut, tiny, shares_tokens=axes.sequence_sharded, sliced_logits=sliced_logits)
    weights = weights_of(_stirred(hollow_model(tiny, SEED)), tiny, SEED)
    if pp == 1:
        model = emptied(hollow_model(tiny, SEED))
        loss = cut(model, group)
        fill(model, weights)
        return _Part([_finished(model, group, kind)], loss)
    bounds = even_bounds(len(find_layers(skeleton(tiny))[1]), pp)
    split = analyse(emptied(hollow_model(tiny, SEED)), bounds)
    stages = []
    for index in range(pp):
        model = emptied(hollow_model(tiny, SEED))
        owned = _owned_by(split.owners, index, ADAPTED if tiny.lora else "")
        loss = cut(model, group, owned)
        stage = Stage(model, split, index, kind, loss)
        stage.parameters_by_name = fill(model, weights, stage.parameters_by_name)
        _finished(model, group, kind)
        stages.append(stage)
    return _Part(stages)


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


def _stirred(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that change its output: new ones are zero, and would hide wrong shards."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _finished(model: PreTrainedModel, group: TensorGroup | None, kind: torch.dtype) -> PreTrainedModel:
    _exact(model, kind)
    if group:
        sum_partial_gradients(model, group)
    return model


def _exact(model: PreTrainedModel, kind: torch.dtype) -> PreTrainedModel:
    """In the proof's precision, with experts computed one by one: torch 2.13's grouped products have no float64."""
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    return model.to(kind).train()


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
