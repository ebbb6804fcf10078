"""Rehearse a long model by short ones: fewer layers and micro-batches, and the straight line through what they take.

Layers of one kind repeat, so bytes and events grow by the same amount with each. Three lengths are run: the line
through two of them must hit the third, otherwise the full model is run. Every moment of a step (part, micro-batch,
module, line of code) has a line of its own, because another moment can own the peak of the full model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.plans.pipeline_bounds import even_bounds
from toolkit.plans.pipeline_orders import layers_by_rank
from toolkit.plans.plan import Plan
from toolkit.runtime.rehearsal.report import PARTS, WIDE, LargeTensor, Moment, Phase, RehearsalSpec, RoleReport

SHORT = (3, 4, 5)
"""Layers of the short models (of a pipeline: per stage): a first one, a last one, and what is between."""
LEAST_ZERO_3, RELEASING_ELEMENTS = 4, 2_500_000_000
"""The same under ZeRO 3: as many layers, and parameters in them, as make it gather and release as in a long model.
With 6 layers of Qwen3 8B, weights of almost all layers were gathered at once, and lines ended 5% too high."""
WORTH = 2.0
"""Least layers of the full model relative to all short ones; below, the full model is run."""
TOLERANCE = 1e-3
"""Largest relative distance of the third length from the line."""
LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_layers", "n_layer", "n_layers")
EXPERTS = ".experts."
"""Part of the names of parameters that are divided between expert ranks."""
MORE_THAN_STAGES = 1
"""Micro-batches beyond the stages of a pipeline: the first stage then holds gradients and a full pipeline at once."""
MOST_DIFFERENT = 8
"""Layers at the beginning that may differ from the rest, such as the dense ones of a mixture of experts."""
REPEATED = 2
"""Micro-batches without a pipeline: the second finds gradients of the first, as every further one does."""


def micro_batches(spec: RehearsalSpec) -> int:
    """Micro-batches to run: enough for the peak of a step with all of them."""
    plan = spec.plan
    if spec.every_layer:
        return plan.grad_accum
    if plan.schedule == "interleaved":  # two rounds of the same length hold as much as all of them
        rounds = max(1, plan.grad_accum // plan.pp)
        return min(plan.grad_accum, 2 * plan.grad_accum // rounds)
    if plan.schedule == "zero_bubble":
        return min(plan.grad_accum, 2 * plan.pp)
    return min(plan.grad_accum, plan.pp + MORE_THAN_STAGES if plan.pp > 1 else REPEATED)


def stage_layers(spec: RehearsalSpec, layers: int) -> tuple[int, ...]:
    """Layers of each pipeline rank."""
    plan = spec.plan
    bounds = plan.pipeline_bounds or even_bounds(layers, plan.pp * plan.chunks)
    return layers_by_rank(bounds, plan.schedule, plan.pp)


def lengths(spec: RehearsalSpec, kinds: Sequence[Any]) -> tuple[int, ...]:
    """Layers (per stage) of the short models; empty: run the full one. `kinds`: what each layer looks like."""
    layers = len(kinds)
    if spec.every_layer or spec.plan.chunks > 1 or layer_key(spec, layers) is None or _shards_grow(spec):
        return ()  # of an encoder-decoder no key counts the layers of both
    prefix, period = _pattern(kinds)
    short = SHORT
    if spec.plan.zero_stage == 3 and spec.plan.pp == 1:
        least = max(LEAST_ZERO_3, -(-RELEASING_ELEMENTS // max(1, _elements(kinds[-1], spec.plan))))
        short = (least, least + 1, least + 2)
    if spec.plan.pp > 1:
        found = short if (prefix, period) == (0, 1) else ()
    else:  # the same rest as in the full model, so that the last layers are of the same kinds
        rest = prefix + (layers - prefix) % period
        first = rest + period * -(-max(short[0] - rest, 1) // period)
        step = period * -(-(short[1] - short[0]) // period)
        found = (first, first + step, first + 2 * step)
    return found if sum(found) * WORTH <= max(stage_layers(spec, layers)) else ()


def _shards_grow(spec: RehearsalSpec) -> bool:
    """Whether a short model's shard may be smaller than one tensor: ZeRO 1 and 2 then reduce and measure it in pieces.

    Lines through such models end too high: 35.4 instead of 33.8 GiB for Llama 8B under ZeRO 2 with recompute. Adapters
    are too small to matter.
    """
    if spec.model.lora is not None:
        return False
    return spec.plan.zero_stage in (1, 2) and spec.plan.pp == 1 and spec.plan.zero_group * spec.plan.token_parts > 1


def _elements(kind: Any, plan: Plan) -> int:
    """Parameters that the ranks of a ZeRO group share of a layer that looks like this."""
    shapes, _ = kind
    return sum(math.prod(shape) // (plan.ep if EXPERTS in name else plan.tp) for name, shape in shapes)


def layer_key(spec: RehearsalSpec, layers: int) -> str | None:
    """Key of the config that holds the number of layers."""
    config = spec.model.config or {}
    return next((key for key in LAYER_COUNTS if config.get(key) == layers), None)


def _pattern(kinds: Sequence[Any]) -> tuple[int, int]:
    """(layers at the beginning that are of other kinds, shortest repeat of the kinds after them)."""
    for prefix in range(min(MOST_DIFFERENT, len(kinds))):
        rest = kinds[prefix:]
        for period in range(1, len(rest) // 2 + 1):
            if all(one == rest[index % period] for index, one in enumerate(rest)):
                return prefix, period
    return 0, len(kinds)


def reduced(spec: RehearsalSpec, layers: int, length: int | None) -> RehearsalSpec:
    """The spec with fewer micro-batches, and with `length` layers per stage (None: all)."""
    count = micro_batches(spec)
    plan = replace(spec.plan, grad_accum=count)
    deepspeed = {**spec.deepspeed, "gradient_accumulation_steps": count}
    model = spec.model
    if length is not None:
        key, total = layer_key(spec, layers), length * plan.pp
        assert key is not None
        assert model.config is not None
        config = {name: _shortened(value, layers, total) for name, value in model.config.items()}
        model = replace(model, config={**config, key: total})
        if plan.pipeline_bounds:
            plan = replace(plan, pipeline_bounds=tuple(range(0, total + 1, length)))
    return replace(spec, plan=plan, deepspeed=deepspeed, model=model)


def _shortened(value: Any, layers: int, total: int) -> Any:
    """Lists with an entry per layer are cut."""
    return value[:total] if isinstance(value, list | tuple) and len(value) == layers else value


def further_micro_batches(report: RoleReport, missing: int) -> RoleReport:
    """A report with the events of the micro-batches that were not run."""
    return replace(report, phases=[replace(phase, counts=_with_more(phase, missing)) for phase in report.phases])


def _with_more(phase: Phase, missing: int) -> dict[Any, int]:
    return {key: round(count + missing * phase.repeated.get(key, 0)) for key, count in phase.counts.items()}


@dataclass(frozen=True)
class Bounds:
    """Bytes at which lines end."""

    gathered: int = 0
    """Of gathered parameters, up to which ZeRO 3 gathers ahead and does not release."""
    wide: int | None = None
    """Of a copy in float64: the largest tensor. Short models may have shards that are smaller than it, and grow."""

    @classmethod
    def of(cls, spec: RehearsalSpec, kinds: Sequence[Any]) -> Bounds:
        """From the DeepSpeed config and the sizes of tables and layers; `kinds`: what each layer looks like."""
        config, live = spec.model.config or {}, spec.deepspeed.get("zero_optimization", {})
        tables = config.get("vocab_size", 0) * config.get("hidden_size", 0)
        largest = max([tables, *(math.prod(shape) for shapes, _ in kinds for _, shape in shapes)])
        width = 4 if spec.plan.precision == "fp32" else 2
        return cls(live.get("stage3_max_live_parameters", 0) * width, 8 * largest or None)


NO_BOUNDS = Bounds()


def extrapolated(reports: Sequence[RoleReport], layers: int, bounds: Bounds = NO_BOUNDS) -> RoleReport | None:
    """The report of a stage with `layers` layers from three short ones; None if they are not on a line.

    The line of gathered parameters ends at its bound, or at what the short models have gathered, if that is more.
    """
    short = [report.layers for report in reports]
    line, last = _Line(short[1], short[2], layers), reports[-1]
    threes = list(zip(*(report.phases for report in reports), strict=True))
    tops = [replace(bounds, gathered=max(bounds.gathered, *map(_gathered, three))) for three in threes]
    phases = [_phase(three[1], three[2], line, top) for three, top in zip(threes, tops, strict=True)]
    last_step = max(number for number, phase in enumerate(phases) if phase.name == "step")
    for number, (three, top) in enumerate(zip(threes, tops, strict=True)):
        if not _on_a_line(three, short, top, is_bound=number != last_step):
            return None
    return replace(
        last,
        phases=phases,
        saved_bytes=line.at(reports[1].saved_bytes, last.saved_bytes),
        wall_seconds=sum(report.wall_seconds for report in reports),
        cpu_seconds=sum(report.cpu_seconds for report in reports),
        resident_bytes=max(report.resident_bytes for report in reports),
        layers=layers,
        ran_layers=tuple(short),
    )


class _Line:
    """The straight line through two lengths."""

    def __init__(self, left: int, right: int, wanted: int) -> None:
        self._factor = (wanted - right) / (right - left)

    def at(self, left: float, right: float) -> int:
        """Value at the wanted length."""
        return round(right + (right - left) * self._factor)


GATHERED, TEMPORARY = PARTS.index("gathered"), PARTS.index("temporary")


def _gathered(phase: Phase) -> int:
    """Most bytes of gathered parameters at any moment."""
    return max((parts[GATHERED] for parts in phase.moments.values()), default=0)


def _on_a_line(three: Sequence[Phase], short: Sequence[int], bounds: Bounds, *, is_bound: bool) -> bool:
    """Whether the third length is where the first two say, for the host, the device and the FLOPs.

    Of the device it is asked moment by moment: another one may own the peak of the third. `is_bound`: it may also be
    below: but for the last step, ZeRO 3 gathers ever fewer further weights, and the line is an upper bound.
    """
    line = _Line(*short)
    first, second, third = three
    said = _phase(first, second, line, bounds)
    pairs = [(said.host_peak_bytes, third.host_peak_bytes), (line.at(first.flops, second.flops), third.flops)]
    if not is_bound or said.device_peak_bytes < third.device_peak_bytes:
        pairs.append((said.device_peak_bytes, third.device_peak_bytes))
    return all(abs(expected - found) <= TOLERANCE * found for expected, found in pairs)


def _phase(left: Phase, right: Phase, line: _Line, bounds: Bounds) -> Phase:
    moments = {}
    for moment, bytes_by_part in right.moments.items():
        if moment in left.moments:
            found = [line.at(a, b) for a, b in zip(left.moments[moment], bytes_by_part, strict=True)]
            moments[moment] = _ended(found, moment, bounds)
    top = _top(moments)
    parts = dict(zip(PARTS, moments[top], strict=True))
    same = _top(left.moments) == _top(right.moments) == top
    if same:  # these know what every tensor has become in the end
        parts = {part: line.at(left.parts[part], right.parts[part]) for part in PARTS}
        parts = dict(zip(PARTS, _ended(list(parts.values()), top, bounds), strict=True))
    is_host = right.host_peak_bytes == right.device_peak_bytes  # a plan for CPUs
    return replace(
        right,
        device_peak_bytes=sum(parts.values()),
        host_peak_bytes=sum(parts.values()) if is_host else line.at(left.host_peak_bytes, right.host_peak_bytes),
        operators=line.at(left.operators, right.operators),
        counts={key: max(0, line.at(left.counts.get(key, 0), count)) for key, count in right.counts.items()},
        repeated={key: max(0, line.at(left.repeated.get(key, 0), count)) for key, count in right.repeated.items()},
        parts=parts,
        peak_at=right.peak_at if same else " ".join(top),
        largest=_largest(left, right, line) if same else [],
        moments=moments,
    )


def _ended(found: Sequence[int], moment: Moment, bounds: Bounds) -> tuple[int, ...]:
    """Bytes by part at a moment, with the lines that end."""
    ended = list(found)
    ended[GATHERED] = min(ended[GATHERED], bounds.gathered)
    if bounds.wide is not None and moment[-1].endswith(WIDE):
        ended[TEMPORARY] = min(ended[TEMPORARY], bounds.wide)
    return tuple(ended)


def _top(moments: Mapping[Moment, tuple[int, ...]]) -> Moment:
    """The moment of the peak."""
    return max(moments, key=lambda moment: sum(moments[moment]))


def _largest(left: Phase, right: Phase, line: _Line) -> list[LargeTensor]:
    """The tensors at the peak; those that grow with the number of layers are extrapolated."""
    before = {(one.part, one.dtype, one.where): one for one in left.largest}
    found = []
    for one in right.largest:
        other = before.get((one.part, one.dtype, one.where), one)
        size = line.at(other.bytes, one.bytes)
        shape = (size * one.shape[0] // one.bytes,) if len(one.shape) == 1 and one.bytes else one.shape
        found.append(replace(one, bytes=size, shape=shape))
    return sorted(found, key=lambda one: -one.bytes)


def describe(report: RoleReport, grad_accum: int) -> str:
    """What of a rank was run, and what follows from it."""
    micro = f"{report.ran_micro_batches} of {grad_accum} micro-batches"
    if not report.extrapolated:
        return f"all {report.layers} layers of the rank and {micro} were run"
    lengths = ", ".join(map(str, report.ran_layers))
    return f"{lengths} of {report.layers} layers and {micro} were run; the figures are those of the straight line"
