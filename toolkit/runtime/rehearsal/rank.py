"""Rehearse ranks: build the engine, two steps, an evaluation and a checkpoint's layout, on fake tensors.

    python -m toolkit.runtime.rehearsal.rank IN OUT     with DS_ACCELERATOR set; started by `toolkit.sessions.rehearse`

Imports are paid once. Every rank runs in a process of its own, forked after them; pipeline stages run in order.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.errors import ToolkitError, first_line
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Model
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.checkpoint.fragments import share
from toolkit.runtime.distributed import process_group
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.metrics.step_clock import Lap
from toolkit.runtime.models.build import load_config, skeleton
from toolkit.runtime.models.first_weights import Ranges
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline.engine import PipelineEngine
from toolkit.runtime.rehearsal import fake_device
from toolkit.runtime.rehearsal.ledger import Ledger
from toolkit.runtime.rehearsal.report import RehearsalSpec, RoleFailed, RoleReport
from toolkit.runtime.sharding.vocab_parallel_loss import follows_head

META_NUMBERS = 256
"""Size of DeepSpeed 0.19.8's message with shapes (`TENSOR_META_SIZE`)."""
AT_A_TIME = 2
"""Ranks that run at the same time."""
PARTS = {"forward": "activations", "backward": "activations", "optimizer": "optimizer"}
"""Part of a step → part of memory that new tensors belong to."""


class PhaseClock:
    """`Clock` that tells the ledger which part of the step runs."""

    def __init__(self, ledger: Ledger) -> None:
        self.watcher: Callable[[str], object] | None = None
        self._ledger, self._open = ledger, ["buffers"]

    @property
    def part_name(self) -> str:
        """The innermost open part."""
        return self._open[-1]

    def enter(self, part: str) -> None:
        """Open a part inside the current one."""
        self._open.append(PARTS.get(part, "buffers"))
        self._ledger.part = self._open[-1]

    def leave(self) -> None:
        """Close the innermost part."""
        self._open.pop()
        self._ledger.part = self._open[-1]

    def hide(self, part: str, seconds: float) -> None:
        """Nothing is timed."""

    def lap(self, *, sample_next: bool) -> Lap:
        """Nothing is timed."""
        return Lap(0.0, {}, {}, [])


def rehearse_rank(spec: RehearsalSpec, rank: int, world: int, heard: list[Any] | None = None) -> RoleReport:
    """Rehearse one rank in this process, which must not be used for anything else afterwards."""
    began, said = time.perf_counter(), list[Any]()
    cpu = time.process_time()
    td.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    local = World(rank=rank, size=world, local_rank=0, local_size=min(spec.local_size, world))
    process_group.adopt(local)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    _install_stand_ins(spec, world, heard or [], said)
    device = "cpu" if spec.backend == "cpu" else fake_device.NAME
    ledger = Ledger(device, _vocabularies(spec))
    phases = []
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        engine: Any = build_engine(
            EngineSpec(
                model=spec.model,
                train=spec.train,
                plan=spec.plan,
                deepspeed=dict(spec.deepspeed),
                schedule=make_schedule(spec.train, spec.total_steps),
            ),
            local,
        )
        _label(ledger, engine)
        phases.append(ledger.finish("start"))
        engine.watch(PhaseClock(ledger))
        _watch_gradients(ledger, engine)
        _watch_modules(ledger, engine.module)
        _plant(spec, rank, engine)
        for _ in range(spec.steps):
            engine.step(_batch(spec))
            assert inner(engine).skipped_steps == 0, "an answer to a read made DeepSpeed skip the update"
            phases.append(ledger.finish("step"))
            _label(ledger, engine)
        if spec.evaluates:
            ledger.part = "activations"
            engine.evaluate(_batch(spec))
            phases.append(ledger.finish("evaluation"))
        saved = sum(f.tensor.numel() * f.tensor.element_size() for f in share(engine.state.fragments()))
        phases.append(ledger.finish("save"))
    mesh: Mesh = engine._mesh
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
        sent=said[:1],
    )


def inner(engine: Any) -> Any:
    """DeepSpeed's engine inside an engine of ours; islands wrap the engine of a replica."""
    is_plain = isinstance(engine, ReplicaEngine | PipelineEngine)
    own: ReplicaEngine | PipelineEngine = engine if is_plain else engine._inner
    return own._engine


def _vocabularies(spec: RehearsalSpec) -> Iterator[int]:
    size = getattr(load_config(spec.model).get_text_config(), "vocab_size", 0)
    yield size
    for ranks in (spec.plan.tp,):
        yield from (size // ranks, -(-size // ranks))


def _batch(spec: RehearsalSpec) -> list[MicroBatch]:
    """Micro-batches of the run's shape in host memory."""
    shape = (spec.plan.micro_batch, spec.seq_len)

    def numbers() -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long)

    return [
        MicroBatch(numbers(), numbers(), position_ids=numbers() if spec.packed else None)
        for _ in range(spec.plan.grad_accum)
    ]


def _label(ledger: Ledger, engine: Any) -> None:
    """Sort what is alive between steps into weights, optimizer states, gradients and the rest."""
    deepspeed = inner(engine)
    wrapper = deepspeed.optimizer
    base = engine.state.base
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    weights += [p.data for p in engine.module.parameters()] + list(engine.module.buffers())
    gradients = [p.grad for p in engine.module.parameters()] + [
        tensor for name, value in vars(wrapper).items() if "grad" in name for tensor in _tensors(value)
    ]
    states = [tensor for group in base.param_groups for tensor in group["params"]]
    states += [tensor for master, state in base.state.items() for tensor in (master, *_tensors(state))]
    known: set[int] = set()
    # Weights last: without masters of its own, an optimizer updates the weights themselves.
    for part, tensors in (("grads", gradients), ("optimizer", states), ("params", weights)):
        ledger.relabel(tensors, part)
        known |= {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)}
    ledger.relabel_rest(known, "buffers")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _watch_gradients(ledger: Ledger, engine: Any) -> None:
    """Label gradients of parameters once they are accumulated."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda own: ledger.relabel([own.grad], "grads"))


def _watch_modules(ledger: Ledger, model: torch.nn.Module) -> None:
    """Keep the path of the module whose forward pass runs, for the place of the peak."""
    for path, module in model.named_modules():

        def enter(module: Any, inputs: Any, path: str = path) -> None:
            ledger.module = path

        module.register_forward_pre_hook(enter)


def _plant(spec: RehearsalSpec, rank: int, engine: Any) -> None:
    """Plant the defect of a test: it must be found by the matching of collectives."""
    where, _, function = spec.defect.partition(":")
    if spec.defect and rank == int(where):
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(engine)


class EmptyWeights:
    """`Weights` of the right shapes; nothing is drawn or read."""

    def __init__(self, section: Model) -> None:
        self._like = {name: (p.shape, p.dtype) for name, p in skeleton(section).named_parameters()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Empty tensors on the host."""
        for name in names:
            shape, dtype = self._like[name]
            yield name, torch.empty(shape, dtype=dtype)

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Empty elements on the host."""
        for name, wanted in ranges.items():
            yield name, [torch.empty(high - low, dtype=self._like[name][1]) for low, high in wanted]

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Empty slices on the host."""
        for name, parameter in parameters.items():
            yield name, torch.empty(parameter.shape, dtype=parameter.dtype)

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """A skeleton's buffers stay as they are."""


def _install_stand_ins(spec: RehearsalSpec, world_size: int, heard: list[Any], said: list[Any]) -> None:
    """Replace what needs real numbers or other ranks: first weights, exchanged objects, shapes between stages.

    `heard`: shapes that the previous stage sent; `said`: what this one sends. docs/rehearsal.md has the list.
    """
    if spec.plan.tp > 1:  # its verdict comes from the autograd graph of a tiny model with real tensors
        verdict = follows_head(spec.model)
        _replace("toolkit.runtime", "follows_head", lambda section: verdict)
    fake_device.patch_fake_tensors()
    kernel = fake_device.cpu_attention if spec.backend == "cpu" else fake_device.attention
    for package in ("torch.nn.functional", "toolkit.runtime"):
        _replace(package, "scaled_dot_product_attention", kernel)
    fake_device.answer_lists()
    fake_device.answer_packed_question(spec.packed)
    _weights()
    _objects(world_size)
    _groups()
    _stage_shapes(heard, said)


def _replace(package: str, name: str, value: Any) -> None:
    """Replace a function in every module of a package that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(package) and name in vars(module):
            setattr(module, name, value)


def _weights() -> None:
    _replace("toolkit.runtime", "open_weights", lambda section, seed: EmptyWeights(section))
    _replace("toolkit.runtime", "check_same_weights", lambda model: None)
    _replace("toolkit.runtime", "sample_bytes", lambda elements, dtype: b"")


def _objects(world_size: int) -> None:
    """Objects that ranks exchange: every rank says what this one says."""
    _replace("toolkit.runtime", "gather_objects", lambda value, group=None: [value] * world_size)
    _replace("toolkit.runtime", "broadcast_object", lambda value, group=None: value)
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        _replace("deepspeed", name, lambda *args, **kwargs: None)


def _groups() -> None:
    """Every new group is a fake one: gloo groups would connect to the other ranks."""
    make: Any = td.new_group
    module: Any = td
    module.new_group = lambda ranks=None, timeout=None, backend=None, *args, **kwargs: make(ranks, backend="fake")


def _stage_shapes(heard: list[Any], said: list[Any]) -> None:
    """Shapes travel from stage to stage as numbers in tensors: here they are handed over by the rehearsal."""
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    send_meta = PipelineEngine._send_tensor_meta

    def send(self: Any, buffer: Any, stage: int) -> Any:
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        said.append((isinstance(buffer, tuple), [(list(t.shape), t.dtype) for t in tensors]))
        return send_meta(self, buffer, stage)

    def receive(self: Any, stage: int) -> Any:
        p2p.recv(torch.empty(META_NUMBERS, dtype=torch.int32, device=self.device), stage)
        several, specs = heard[0]
        buffers = [self._allocate_or_extend_buffers(i, shape, dtype) for i, (shape, dtype) in enumerate(specs)]
        return tuple(buffers) if several else buffers[0]

    PipelineEngine._send_tensor_meta, PipelineEngine._recv_tensor_meta = send, receive


def main(argv: list[str]) -> int:
    """Read (spec, ranks by stage, world size) and write one report per rank, as pickles."""
    warnings.filterwarnings("ignore")
    source, target = Path(argv[0]), Path(argv[1])
    spec, stages, world = pickle.loads(source.read_bytes())  # noqa: S301 - written by our own parent
    if spec.backend != "cpu":
        fake_device.install(spec.device_memory_bytes, spec.device_name)
    process_group.skip_inference_build()
    for module in ("bf16_optimizer", "zero.stage3", "zero.stage_1_and_2", "zero.muon.muon_optimizer", "pipe.engine"):
        importlib.import_module(f"deepspeed.runtime.{module}")
    heard: list[Any] = []
    for ranks in stages:
        reports = [report for group in _groups_of(ranks) for report in _forked(spec, group, world, heard, target)]
        if any(isinstance(report, RoleFailed) for report in reports):
            return 1
        heard = next((report.sent for report in reports if report.sent), [])
    return 0


def _groups_of(ranks: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ranks), AT_A_TIME):
        yield ranks[start : start + AT_A_TIME]


def _forked(spec: RehearsalSpec, ranks: list[int], world: int, heard: list[Any], target: Path) -> list[Any]:
    """Rehearse ranks, each in a process forked from this one."""
    children = {}
    for rank in ranks:
        child = os.fork()
        if child == 0:
            _child(spec, rank, world, heard, target)
        children[child] = rank
    found = []
    for child, rank in children.items():
        os.waitpid(child, 0)
        path = target / str(rank)
        if not path.exists():
            path.write_bytes(pickle.dumps(RoleFailed(rank, "the process ended without a report", False)))
        found.append(pickle.loads(path.read_bytes()))  # noqa: S301 - written by our own child
    return found


def _child(spec: RehearsalSpec, rank: int, world: int, heard: list[Any], target: Path) -> None:
    torch.set_num_threads(1)
    # DeepSpeed 0.19.8 refuses to start without these, though the process group exists already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    report: RoleReport | RoleFailed
    try:
        report = rehearse_rank(spec, rank, world, heard)
    except UnsupportedOperatorException as error:
        report = RoleFailed(rank, f"the operator {error.func} can't run on fake tensors", True, traceback.format_exc())
    except Exception as error:
        reason = (
            first_line(error) if isinstance(error, ToolkitError) else f"{type(error).__name__}: {first_line(error)}"
        )
        report = RoleFailed(rank, reason, False, traceback.format_exc())
    part = target / f"{rank}.part"
    part.write_bytes(pickle.dumps(report))
    part.rename(target / str(rank))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
