"""Rehearse one rank: build the engine, two steps, an evaluation and a checkpoint's layout, on fake tensors."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as td
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.recipe.objective_sections import PROMPT_SHARE
from toolkit.recipe.schedules import make_schedule
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.checkpoint.fragments import share
from toolkit.runtime.distributed import process_group
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.engine.protocol import StepResult
from toolkit.runtime.engine.weight_average import FirstWeights
from toolkit.runtime.models.build import load_config, skeleton
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline.split import count_layers
from toolkit.runtime.rehearsal import fake_device, stand_ins
from toolkit.runtime.rehearsal.known_results import KnownResults
from toolkit.runtime.rehearsal.ledger import Ledger
from toolkit.runtime.rehearsal.reduced import stage_layers
from toolkit.runtime.rehearsal.report import Phase, RehearsalSpec, RoleReport
from toolkit.runtime.rehearsal.watch import PhaseClock, inner, label, models, watch_gradients, watch_modules


def rehearse_rank(spec: RehearsalSpec, rank: int, world: int, shapes: stand_ins.Shapes | None = None) -> RoleReport:
    """Rehearse one rank in this process, which must not be used for anything else afterwards."""
    began = time.perf_counter()
    cpu = time.process_time()
    td.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    local = World(rank=rank, size=world, local_rank=0, local_size=min(spec.local_size, world))
    process_group.adopt(local)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    stand_ins.install(spec, local, shapes or stand_ins.Shapes())
    lengths = _lengths(spec)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = "cpu" if spec.backend == "cpu" else fake_device.NAME
    ledger = Ledger(device, KnownResults(mode), _vocabularies(spec), lengths)
    stand_ins.count_rng_states(ledger)
    if not spec.every_layer:
        stand_ins.shorten_loss(ledger)
    with mode, ledger:
        engine = _engine(spec, local)
        label(ledger, engine)
        start = ledger.finish("start")
        first = FirstWeights(engine.state) if spec.train.reference == "live" else None
        phases = [start, *_steps(spec, engine, ledger, first)]
        saved = sum(f.tensor.numel() * f.tensor.element_size() for f in share(engine.state.fragments()))
        phases.append(ledger.finish("save"))
    mesh: Mesh = engine._mesh
    layers = stage_layers(spec, count_layers(models(engine)[0]))[mesh.pipe]
    return RoleReport(
        rank=rank,
        stage=mesh.pipe,
        tensor=mesh.tensor or mesh.sequence,
        data=mesh.data,
        phases=phases,
        optimizer=type(inner(engine).optimizer).__name__,
        saved_bytes=saved,
        wall_seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        layers=layers,
        ran_layers=(layers,),
        ran_micro_batches=spec.plan.grad_accum,
        tells_lengths=spec.seq_len in lengths,
    )


def _engine(spec: RehearsalSpec, world: World) -> Any:
    parts = EngineSpec(
        model=spec.model,
        # Preferences are sums per document, on top of each token's loss.
        train=spec.train if _keeps_objective(spec) else replace(spec.train, objective=None, preference=None),
        plan=spec.plan,
        deepspeed=dict(spec.deepspeed),
        schedule=make_schedule(spec.train, spec.total_steps),
    )
    return build_engine(parts, world)


def _keeps_objective(spec: RehearsalSpec) -> bool:
    """Whether the loss itself is rehearsed: that of several texts, or of complete logits."""
    return spec.texts > 1 or spec.train.objective == "distill"


def _steps(spec: RehearsalSpec, engine: Any, ledger: Ledger, first: FirstWeights | None) -> Iterator[Phase]:
    """Steps and an evaluation; before each step a pass with the first weights, if there is a live reference."""
    clock = PhaseClock(ledger, spec.plan.pp > 1, lambda: label(ledger, engine, first))
    engine.watch(clock)
    watch_gradients(ledger, engine, sharded=spec.plan.zero_stage >= 2 and spec.plan.pp == 1)
    for model in models(engine):
        watch_modules(model, clock.at)
    repeated = spec.plan.grad_accum if spec.plan.pp > 1 else 1
    before: StepResult | None = None
    for _ in range(spec.steps):
        clock.begin()
        if first is not None:
            with first.in_use():
                engine.look(_batch(spec))
        result = engine.step(_batch(spec))
        if before is not None:
            assert before.loss  # read as the training loop does, when the next step has been started
        before = result
        assert inner(engine).skipped_steps == 0, "an answer to a read made DeepSpeed skip the update"
        yield ledger.finish("step", repeated)
        label(ledger, engine, first)
    if spec.evaluates:
        clock.begin()
        ledger.part = "activations"
        engine.evaluate(_batch(spec))
        yield ledger.finish("evaluation", repeated)
        ledger.part = "temporary"


def _vocabularies(spec: RehearsalSpec) -> Iterator[int]:
    size = getattr(load_config(spec.model).get_text_config(), "vocab_size", 0)
    yield size
    for ranks in (spec.plan.tp,):
        yield from (size // ranks, -(-size // ranks))


def _lengths(spec: RehearsalSpec) -> set[int]:
    """Lengths of a row, of its documents, of a rank's part of it and of all rows, but for sizes of the model itself."""
    if spec.rows == "image":
        return set()
    spans = _row_lengths(spec)
    complete = [spans[0] + rest for rest in spans[1:]] if spec.rows == "pairs" else []
    rows = [spec.seq_len, spec.seq_len // spec.plan.token_parts, *spans, *complete]
    config = load_config(spec.model).get_text_config()
    own = {size for parameter in skeleton(spec.model).parameters() for size in parameter.shape}
    own |= {getattr(config, name, None) or 0 for name in ("head_dim", "num_attention_heads", "num_key_value_heads")}
    own |= {size // spec.plan.tp for size in own}
    return {length * samples for length in rows for samples in (1, _num_rows(spec))} - own - {0, 1}


def _batch(spec: RehearsalSpec) -> list[MicroBatch]:
    """Micro-batches of the run's shape in host memory."""
    return [_micro_batch(spec) for _ in range(spec.plan.grad_accum)]


def _micro_batch(spec: RehearsalSpec) -> MicroBatch:
    samples = spec.plan.micro_batch

    def numbers() -> torch.Tensor:
        return torch.zeros((_num_rows(spec), spec.seq_len), dtype=torch.long)

    if spec.rows == "image":
        config = load_config(spec.model)
        pixels = torch.zeros(samples, config.num_channels, config.image_size, config.image_size)
        return MicroBatch(None, torch.zeros(samples, dtype=torch.long), pixel_values=pixels)
    if spec.rows == "text":
        given = torch.zeros(samples, spec.texts)
        more = {"scores": given, "keys": given.long()} if spec.texts > 1 else {}
        labels = torch.zeros(samples, dtype=torch.long)
        return MicroBatch(numbers(), labels, numbers(), documents=_documents(spec), **more)
    if spec.rows == "seq2seq":  # a source and a target, both padded to the width of the row
        return MicroBatch(numbers(), numbers(), numbers(), decoder_input_ids=numbers())
    positions = numbers() if spec.rows in ("packed", "pairs") else None
    mask = numbers() if spec.rows == "padded" else None
    found = MicroBatch(numbers(), numbers(), mask, positions, documents=_documents(spec))
    distill = spec.train.distill
    if distill is None:
        return found
    size = load_config(spec.model).get_text_config().vocab_size
    kept, shape = min(distill.top_k, size), (_num_rows(spec), spec.seq_len)
    ids, logps = torch.zeros(*shape, kept, dtype=torch.int32), torch.zeros(*shape, kept + int(kept < size))
    return replace(found, teacher_ids=ids, teacher_logps=logps)


def _documents(spec: RehearsalSpec) -> Documents:
    """Bounds can't be read from fake tensors: packed rows hold two documents, padded rows end in padding."""
    row = _row_lengths(spec)
    if len(row) == 3:
        return Documents.of_pairs(row * _num_rows(spec), _num_rows(spec))
    return Documents.of_lengths(row * _num_rows(spec), _num_rows(spec), spec.rows in ("padded", "text"))


def _num_rows(spec: RehearsalSpec) -> int:
    """Rows of a micro-batch."""
    return spec.plan.micro_batch * spec.texts


def _row_lengths(spec: RehearsalSpec) -> list[int]:
    """Tokens of each document of a row; of what two documents share, and of the rest of both."""
    if spec.rows == "pairs":
        shared = int(spec.seq_len * PROMPT_SHARE)
        rest = (spec.seq_len - shared) // 2
        return [shared, rest, spec.seq_len - shared - rest]
    cut = spec.seq_len // 2 if spec.rows == "packed" else spec.seq_len - 1 if spec.rows in ("padded", "text") else 0
    return [length for length in (cut, spec.seq_len - cut) if length]
