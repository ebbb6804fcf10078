"""An accelerator that is not there: torch and DeepSpeed run on it with fake tensors, on a CPU build, uncompiled.

torch's Python backend (PrivateUse1, experimental in 2.13) gives autograd a device guard, hooks and streams. Everything
that is replaced here is replaced because torch 2.13.0 or DeepSpeed 0.19.8 would touch a driver or refuse the device;
docs/rehearsal.md lists each stand-in. `tests/runtime/rehearsal` fails if one of the private names has gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration

NAME = "rehearsal"
"""Type of the fake device in torch."""
DTYPES = {
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
}


WITH_CUDA_KERNELS = ("silu_backward", "mish_backward")
"""Operators that torch 2.13 composes of others where a device has no kernel of its own; all that CPUs have one for."""
_LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
"""Registrations end with this object."""


class HostWaits:
    """Tells the ledger that the host waits for the device."""

    def __init__(self) -> None:
        self.listener: Callable[[str], None] = lambda kind: None

    def notify(self, kind: str) -> None:
        """Report a wait of this kind."""
        self.listener(kind)


waits = HostWaits()
"""Of this process: torch's and DeepSpeed's streams are process-wide, too."""


class Stream:
    """A stream without work; a wait of the host is reported."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def synchronize(self) -> None:
        """The host waits for the stream."""
        waits.notify("stream.synchronize")

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event at this point of the stream."""
        return event or Event()

    def wait_event(self, _event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, _stream: Any) -> None:
        """Nothing to wait for."""


class Event:
    """An event that has happened; a wait of the host is reported."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, _stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, _stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def synchronize(self) -> None:
        """The host waits for the event."""
        waits.notify("event.synchronize")

    def elapsed_time(self, _other: Any) -> float:
        """Milliseconds between two events."""
        return 0.0


_STREAM = Stream()


class BackendModule(backend_registration._DummyBackendModule):
    """`torch.rehearsal`: what torch asks of a backend's module."""

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        """A state of the right type."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        """Nothing is drawn."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types of mixed precision."""
        return [torch.bfloat16, torch.float16]

    def current_stream(self, *_: Any) -> Stream:
        """The only stream."""
        return _STREAM


def install(memory_bytes: int, name: str) -> None:
    """Register the device with torch and with DeepSpeed. Call once, before the first fake tensor is made."""
    # These check the signature of `_make_subclass` when they are imported, so they come first.
    import torch._dynamo  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=BackendModule())
    # torch.tensor(3.0, device=...) would else be made on the device before the mode sees it.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment, method-assign]
    _use_cuda_keys()
    _name_cuda_kernels()
    from deepspeed.accelerator import set_accelerator

    set_accelerator(_accelerator(memory_bytes, name))


def patch_fake_tensors() -> None:
    """Make fake tensors movable the way DeepSpeed moves tensors: by replacing `.data`.

    torch 2.13's fake tensors keep their first device when their data is replaced, so a moved parameter would silently
    stay on the host; and `Module.to` swaps fake parameters, which fails where weak references exist.
    """
    base: Any = torch._C.TensorBase.data

    def put(self: Any, value: torch.Tensor) -> None:
        base.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    fake: Any = FakeTensor
    fake.data = property(base.__get__, put)
    fake.pin_memory = lambda self, *args, **kwargs: self
    fake.is_pinned = lambda self, *args, **kwargs: self.fake_device.type == "cpu"
    fake.record_stream = lambda self, *args: None
    module: Any = torch.nn.Module
    module._apply = _move


def _move(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Change the data of every parameter and buffer."""
    for part in module.modules() if recurse else [module]:
        for parameter in part._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = change(parameter.data)
                    if parameter.grad is not None:
                        parameter.grad.data = change(parameter.grad.data)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = change(buffer)
    return module


def _use_cuda_keys() -> None:
    """Give fake tensors of the device CUDA's dispatch keys: `.data =` is refused between CPU and PrivateUse1 keys."""
    make: Any = torch.Tensor._make_subclass

    def make_subclass(*args: Any, device_for_backend_keys: torch.device | None = None, **kwargs: Any) -> Any:
        if device_for_backend_keys is not None and device_for_backend_keys.type == NAME:
            device_for_backend_keys = torch.device("cuda", 0)
        return make(*args, device_for_backend_keys=device_for_backend_keys, **kwargs)

    tensor: Any = torch.Tensor
    tensor._make_subclass = staticmethod(make_subclass)


def _name_cuda_kernels() -> None:
    """Tell the dispatcher which operators have a kernel on GPUs.

    A CPU build of torch 2.13 has none for them, so autograd would take them apart into several operators, each with a
    tensor of its own: three more of the width of the MLP per layer with SiLU.
    """

    def never_called(*_: Any) -> Any:
        raise AssertionError("fake tensors are handled before a kernel is reached")

    for name in WITH_CUDA_KERNELS:
        _LIBRARY.impl(name, never_called, "CUDA")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """SDPA with the kernel that a GPU takes: flash without a mask, memory-efficient with one or in fp32.

    torch's own choice is in C++ and goes by the real device; here it would be the math kernel.
    """
    scale = options.get("scale")
    half = query.dtype in (torch.bfloat16, torch.float16)
    if half and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    key, value = _repeated(query, key, options), _repeated(query, value, options)
    bias = _bias(query, attn_mask)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    trained = torch.is_grad_enabled() and query.requires_grad
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, trained, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """SDPA with the flash kernel that torch takes on a CPU, which keeps no scores and repeats no heads."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias, scale = _bias(query, attn_mask), options.get("scale")
    return flash(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]  # type: ignore[no-any-return]


def _repeated(query: torch.Tensor, other: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Keys or values with as many heads as the queries."""
    return other.repeat_interleave(query.shape[-3] // other.shape[-3], -3) if options.get("enable_gqa") else other


def _bias(query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as a tensor that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))


def _accelerator(memory_bytes: int, name: str) -> Any:
    """DeepSpeed's accelerator of CUDA, with everything that touches a driver replaced."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def answer(value: Any) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: value

    members: dict[str, Any] = {method: answer(None) for method in _NOTHING}
    members |= {method: answer(True) for method in _TRUE} | {method: answer(0) for method in _ZERO}
    members |= {method: answer(_STREAM) for method in ("current_stream", "default_stream")}
    members |= {method: answer(memory_bytes) for method in ("total_memory", "available_memory")}
    for kind, dtype in DTYPES.items():
        make = functools.partial(torch.tensor, dtype=dtype, device=f"{NAME}:0")
        members[f"{kind}Tensor"] = property(answer(make))
    members |= {
        "Stream": Stream,
        "Event": Event,
        "device_name": lambda self, index=None: NAME if index is None else f"{NAME}:0",
        "device": lambda self, index=None: torch.device(NAME, 0),
        "current_device_name": answer(f"{NAME}:0"),
        "device_count": answer(8),
        "get_device_name": answer(name),
        "synchronize": lambda self, index=None: waits.notify("device.synchronize"),
        "get_rng_state": lambda self, index=None: torch.zeros(16, dtype=torch.uint8),
        "stream": lambda self, stream: stream if stream is not None else _STREAM,
        "memory_stats": lambda self, index=None: {},
        "is_triton_supported": answer(False),
        "is_current_stream_capturing": answer(False),
        "lazy_call": lambda self, callback: callback(),
        "on_accelerator": lambda self, tensor: tensor.device.type == NAME,
        "pin_memory": lambda self, tensor, align_bytes=1: tensor,
        "communication_backend_version": answer((2, 0)),
    }
    accelerator: Any = type("RehearsalAccelerator", (CUDA_Accelerator,), members)()
    accelerator._name, accelerator._communication_backend_name = NAME, "fake"
    return accelerator


_NOTHING = (
    "set_device", "set_rng_state", "manual_seed", "manual_seed_all", "empty_cache", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "range_push", "range_pop",
)  # fmt: skip
_TRUE = ("is_available", "is_bf16_supported", "is_fp16_supported", "is_pinned")
_ZERO = (
    "current_device", "initial_seed", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_cached", "max_memory_cached",
)  # fmt: skip


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor is in the memory of the fake accelerator."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == NAME
