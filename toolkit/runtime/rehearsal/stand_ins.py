"""Stands in for what needs real numbers, other ranks or a checkpoint: first weights, exchanged objects, groups."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as td
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula
from transformers import PreTrainedModel

from toolkit.recipe.model_section import Model
from toolkit.runtime.distributed import process_group, rng
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.layers import fused_kernels
from toolkit.runtime.models import adapters, attention, head_loss
from toolkit.runtime.models.build import load_config, skeleton
from toolkit.runtime.models.first_weights import AdaptedWeights, Ranges
from toolkit.runtime.models.parameter_shards import replace_parameter, sites
from toolkit.runtime.pipeline import transfers
from toolkit.runtime.rehearsal import fake_device, reads
from toolkit.runtime.rehearsal.ledger import Ledger
from toolkit.runtime.rehearsal.report import RehearsalSpec, Trials
from toolkit.runtime.sharding.vocab_parallel_loss import follows_head

META_NUMBERS = 256
"""Size of DeepSpeed 0.19.8's message with shapes (`TENSOR_META_SIZE`)."""
RUN_BLOCKS = 3
"""Blocks of the vocabulary that a rehearsed loss runs."""
WRAPPERS = (
    "torch._dynamo",
    "transformers.modeling_utils",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.pipe.engine",
)
"""Modules that are imported before ranks are forked."""


def prepare(spec: RehearsalSpec) -> None:
    """Register the device and import everything, before ranks are forked."""
    if spec.backend != "cpu":
        fake_device.install(spec.device_memory_bytes, spec.device_name)
    import_all()
    if _is_quantized(spec.model):
        importlib.import_module("bitsandbytes.nn")  # makes tensors, which must not be fake
        register_flop_formula(torch.ops.bitsandbytes.gemm_4bit)(_gemm_4bit_flops)


def import_all() -> None:
    """Import what every rank needs: several seconds, paid once."""
    process_group.skip_inference_build()
    process_group.compile_on_first_call()
    for module in WRAPPERS:
        importlib.import_module(module)


def make_trials(model: Model) -> Trials:
    """Try on a tiny model whether the head can compute the loss, and which fused operators agree on a CPU.

    The trials compare numbers, which fake tensors do not have: there they would fail, and a run with complete logits
    would be rehearsed. Call in a process that is not forked afterwards: autograd's threads do not survive a fork.
    """
    own = attention.why_not(load_config(model), model.task)
    kernels = fused_kernels.kernels_of(model)
    return Trials(reason=head_loss.why_not(model), follows=follows_head(model), attention=own, kernels=kernels)


def remember(trials: Trials) -> None:
    """Use the verdicts of trials with real numbers from now on; a trial of its own would need autograd's threads."""
    _replace("toolkit.runtime", "follows_head", lambda section: trials.follows)
    _replace("toolkit.runtime.models.head_loss", "why_not", lambda section: trials.reason)
    _replace("toolkit.runtime.models.attention", "why_not", lambda config, task: trials.attention)
    _replace("toolkit.runtime.layers", "kernels_of", lambda section: trials.kernels)


class EmptyWeights:
    """`Weights` of the right shapes; nothing is drawn or read."""

    def __init__(self, model: torch.nn.Module) -> None:
        """`model`: a skeleton."""
        self._like = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}

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


def _is_quantized(section: Model) -> bool:
    return section.lora is not None and section.lora.quantize == "4bit"


def _gemm_4bit_flops(inputs: Any, _packed: Any, shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of a product with a 4-bit matrix of this shape; torch passes shapes instead of tensors."""
    return int(2 * math.prod(inputs) * shape[0])


def quantized_model(section: Model, seed: int, *, dequantized: bool = False) -> PreTrainedModel:
    """`build_model` for a 4-bit base: bitsandbytes' layers with empty weights and constants of the right sizes.

    transformers quantises fp32 tensors one by one on the device, so what is not quantised is there in fp32.
    """
    layers, rules = (
        importlib.import_module(f"transformers.quantizers.{name}") for name in ("base", "quantizers_utils")
    )
    assert section.lora is not None
    model, device = skeleton(section), get_accelerator().current_device_name()
    kept, where = layers.get_keys_to_not_convert(model), sites(model)
    for name, linear in model.named_modules():
        if type(linear) is torch.nn.Linear and rules.should_convert_module(name, kept):
            _quantize(linear, device)
    for parameter in list(model.parameters()):
        if parameter.dtype != torch.uint8:
            replace_parameter(where, parameter, torch.empty(parameter.shape, dtype=torch.float32, device=device))
    model.is_loaded_in_4bit = True
    rng.seed(seed)
    return adapters.with_adapters(model, section.lora, section.task)


def _quantize(linear: Any, device: str) -> None:
    """Make a linear layer one of bitsandbytes 0.50, without its constructor, whose parameters can't be fake."""
    linear.__class__ = importlib.import_module("bitsandbytes.nn").Linear4bit
    linear.compute_dtype, linear.compute_type_is_set = torch.bfloat16, True
    linear.quant_state, linear.quant_storage, linear.support_avx512bf16_for_cpu = None, torch.uint8, False
    linear.weight = _packed(tuple(linear.weight.shape), device)


def _packed(shape: tuple[int, ...], device: str) -> Any:
    """A matrix in nf4 with double quantisation, as `Params4bit` of bitsandbytes 0.50 holds it."""
    QuantState = importlib.import_module("bitsandbytes.functional").QuantState  # noqa: N806 - a class

    count = math.prod(shape)
    blocks = -(-count // 64)
    second = QuantState(
        absmax=torch.empty(-(-blocks // 256), device=device), code=torch.empty(256, device=device), blocksize=256,
        dtype=torch.float32,
    )  # fmt: skip
    packed: Any = torch.nn.Parameter(torch.empty((-(-count // 2), 1), dtype=torch.uint8, device=device), False)
    packed.quant_state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8, device=device), shape=torch.Size(shape),
        code=torch.empty(16, device=device), blocksize=64, quant_type="nf4", dtype=torch.float32,
        offset=torch.empty((), device=device), state2=second,
    )  # fmt: skip
    packed.compress_statistics, packed.quant_type = True, "nf4"
    return packed


class Shapes:
    """Shapes and types that pipeline stages tell each other."""

    def __init__(self, heard: list[Any] | None = None, tell: Callable[[list[Any]], None] = lambda shapes: None) -> None:
        """`heard`: what the previous stage has sent; `tell` is called once with what this one sends."""
        self._heard, self._tell, self._said = heard or [], tell, list[Any]()

    def send(self, shapes: Any) -> None:
        """Send shapes to the next stage."""
        self._said.append(shapes)
        if len(self._said) == 1:
            self._tell(self._said)

    def receive(self) -> Any:
        """Shapes from the previous stage.

        With several chunks per rank, the first rank receives from the last one: shapes are those that it has sent.
        """
        return (self._heard or self._said)[0]


def install(spec: RehearsalSpec, world: World, shapes: Shapes) -> None:
    """Replace what needs real numbers or other ranks: first weights, exchanged objects, shapes between stages.

    docs/rehearsal.md has the list.
    """
    assert spec.trials is not None, "trials with real numbers come first"
    if spec.backend != "cpu":
        _replace("toolkit.runtime", "_on_recent_gpu", lambda: "V100" not in spec.device_name)
        _transfers_as_on_gpus()
    fake_device.patch_fake_tensors()
    kernel = fake_device.cpu_attention if spec.backend == "cpu" else fake_device.attention
    for package in ("torch.nn.functional", "toolkit.runtime"):
        _replace(package, "scaled_dot_product_attention", kernel)
    _replace("toolkit.runtime.mixtures", "exchange_sizes", even_sizes)
    _replace("toolkit.runtime.islands", "ThreadPoolExecutor", AtOnce)
    reads.answer_lists()
    reads.answer_packed_question(spec.rows == "packed")
    _skeletons()
    _weights()
    if _is_quantized(spec.model):
        _replace("toolkit.runtime", "build_model", quantized_model)
    _objects(world.size)
    _groups(world.rank)
    _neighbours()
    _stage_shapes(shapes)


def count_rng_states(ledger: Ledger) -> None:
    """Count the states of the random generator that recomputed layers keep: no operator makes them."""
    read = torch.get_rng_state
    module: Any = torch

    def counted() -> torch.Tensor:
        state = read()
        ledger.count(state)
        return state

    module.get_rng_state = counted


def shorten_loss(ledger: Ledger) -> None:
    """Of many blocks of the vocabulary run the first two and the last: all take the same bytes.

    FLOPs of the others are counted as those of the second one.
    """
    every = head_loss._columns

    def columns(weight: torch.Tensor, rows: int) -> Iterator[tuple[int, int]]:
        blocks = list(every(weight, rows))
        if len(blocks) <= RUN_BLOCKS:
            yield from blocks
            return
        yield blocks[0]
        before = ledger.flops
        yield blocks[1]
        ledger.add_flops((ledger.flops - before) * (len(blocks) - RUN_BLOCKS))
        yield blocks[-1]

    module: Any = head_loss
    module._columns = columns


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given at once, in the calling thread: what other threads do is not recorded."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done."""
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


def even_sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """`exchange_sizes` of experts with even loads; the host waits for the device as in a run."""
    fake_device.waits.notify("sizes of the exchange of experts")
    ranks, parts, _ = sent.shape
    places = ranks * parts
    even = [rows // places + (place < rows % places) for place in range(places)]
    by_part = [even[part * ranks : (part + 1) * ranks] for part in range(parts)]
    return by_part, by_part


def _replace(package: str, name: str, value: Any) -> None:
    """Replace a function in every module of a package that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(package) and name in vars(module):
            setattr(module, name, value)


def _weights() -> None:
    known: list[tuple[Model, EmptyWeights]] = []  # chunks of a pipeline have the same source

    def open_weights(section: Model, seed: int, empty: Any = None, *, mapped: bool = False) -> EmptyWeights:
        found = next((weights for own, weights in known if own == section), None) or EmptyWeights(skeleton(section))
        known.append((section, found))
        return found

    _replace("toolkit.runtime", "open_weights", open_weights)
    _replace("toolkit.runtime", "adapted_weights", lambda base, model, lora: AdaptedWeights(base, model))
    _replace("toolkit.runtime", "check_same_weights", lambda model: None)
    _replace("toolkit.runtime.models.zero3_start", "digest", lambda tensor: "")


def _skeletons() -> None:
    """Make parameters without bytes as plain ones of the meta device, not as fake ones: six times faster."""
    make = skeleton

    def made(section: Model) -> PreTrainedModel:
        with _disable_current_modes():
            model = make(section)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()  # fake, and counted
        return model

    _replace("toolkit.runtime", "skeleton", made)


def _objects(world_size: int) -> None:
    """Objects that ranks exchange: every rank says what this one says."""
    _replace("toolkit.runtime", "gather_objects", lambda value, group=None: [value] * world_size)
    _replace("toolkit.runtime", "broadcast_object", lambda value, group=None: value)
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        _replace("deepspeed", name, lambda *args, **kwargs: None)


def _groups(rank: int) -> None:
    """Every new group is a fake one: gloo groups would connect to the other ranks. Other ranks' groups are not made."""
    make: Any = td.new_group
    module: Any = td

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return td.GroupMember.NON_GROUP_MEMBER
        return make(ranks, backend="fake")

    module.new_group = new_group


def _neighbours() -> None:
    """List every rank with its next stage in one pass: DeepSpeed 0.19.8 looks each of 16,384 ranks up in all lists."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    def build(self: Any) -> list[list[int]]:
        lists = self._topo.get_axis_comm_lists("pipe")
        return sorted([rank, own[(place + 1) % len(own)]] for own in lists for place, rank in enumerate(own))

    PipelineParallelGrid._build_p2p_groups = build


def _transfers_as_on_gpus() -> None:
    """Stages exchange in batches, as over NCCL; torch 2.13 asks which backend the fake device has, and finds none."""
    transfers.BATCHES = (*transfers.BATCHES, "fake")
    module: Any = td
    module.batch_isend_irecv = lambda operations: [one.op(one.tensor, one.peer) for one in operations]


def _stage_shapes(shapes: Shapes) -> None:
    """Shapes travel from stage to stage as numbers in tensors: here they are handed over by the rehearsal."""
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    send_meta = PipelineEngine._send_tensor_meta

    def send(self: Any, buffer: Any, stage: int) -> Any:
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        shapes.send((isinstance(buffer, tuple), [(list(t.shape), t.dtype) for t in tensors]))
        return send_meta(self, buffer, stage)

    def receive(self: Any, stage: int) -> Any:
        p2p.recv(torch.empty(META_NUMBERS, dtype=torch.int32, device=self.device), stage)
        several, specs = shapes.receive()
        buffers = [self._allocate_or_extend_buffers(i, shape, dtype) for i, (shape, dtype) in enumerate(specs)]
        return tuple(buffers) if several else buffers[0]

    PipelineEngine._send_tensor_meta, PipelineEngine._recv_tensor_meta = send, receive
