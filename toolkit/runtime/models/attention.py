"""One attention for packed, padded and plain sequences, registered with transformers and used by every strategy.

transformers asks a mask function for a mask and hands what it returns to every layer. Ours returns the document bounds
of the micro-batch instead of a mask over all pairs of tokens, so a layer that is recomputed still has its own bounds,
whatever micro-batch came after it. A mask that is not made of known parts is left to transformers, with a line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers.masking_utils as masking
from deepspeed.accelerator import get_accelerator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.errors import BadInput, first_line
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.attention_kernels import CHOICES, Request, attend, by_mask
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.embedder import Embedder, noisy
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.registry_attention import set_function
from toolkit.runtime.models.tiny_models import VOCABULARY, trial_config
from toolkit.runtime.models.trials import tried

TOLERANCE = 1e-4
"""Relative limit of a trial in fp32: a token too many or too few changes results by much more."""
LARGEST = 20_000_000
"""Parameters of a tiny model above which its config has not become tiny."""
NAMES = {kernel: f"documents_{number}" for number, kernel in enumerate(CHOICES)}
"""Kernel → name in transformers' registry; no name of a kernel, by which some models choose code of their own."""
EXPECTED_SETTINGS = (
    *("position_ids", "is_causal", "sliding_window", "scaling", "dropout", "softcap", "s_aux"),
    "num_items_in_batch",  # for the loss; transformers' Trainer hands it through all layers
)


class UnknownAttention(Exception):
    """A layer asks for something that this attention does not have; the message says what."""


@dataclass(frozen=True, eq=False)
class DocumentMask:
    """Travels in the place of a mask."""

    documents: Documents
    causal: bool
    window: int | None


class _Current(threading.local):
    """Documents of the forward pass that runs in this thread."""

    documents: Documents | None = None


_current = _Current()


@contextlib.contextmanager
def attending(documents: Documents | None) -> Iterator[None]:
    """Masks that are made inside this context are those of the documents."""
    before, _current.documents = _current.documents, documents
    try:
        yield
    finally:
        _current.documents = before


def forward(model: Callable[..., Any], micro: MicroBatch) -> Any:
    """A model's forward pass on a micro-batch, with attention inside its documents."""
    located = micro.located()
    with attending(located.documents), noisy(located):
        return model(**micro.inputs())


def current_mask(mask_function: Callable[..., Any], padded: bool) -> DocumentMask | None:
    """The current documents in place of transformers' mask; None if the mask is more than they say."""
    documents, pattern = _current.documents, _pattern(mask_function)
    if documents is None or pattern is None or (padded and not documents.padded):
        return None
    return DocumentMask(documents, pattern.causal, pattern.window)


@dataclass(frozen=True)
class _Pattern:
    """What a mask function of transformers lets through."""

    causal: bool = False
    window: int | None = None
    packed: bool = False


def _pattern(mask_function: Any) -> _Pattern | None:
    """The pattern of a mask function of transformers 5.22.2; None if it has an unknown part.

    Its functions are plain closures, so they are known by their names. If those change, all masks become unknown and
    `test_attention.py` fails.
    """
    if mask_function is masking.causal_mask_function:
        return _Pattern(causal=True)
    if mask_function is masking.bidirectional_mask_function:
        return _Pattern()
    kind = getattr(mask_function, "__qualname__", "").split(".")[0]
    inner = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    if kind == "sliding_window_overlay":
        return _Pattern(window=int(inner["sliding_window"]))
    if kind == "packed_sequence_mask_function":
        return _Pattern(packed=True)
    if kind != "and_masks":
        return None
    found = [_pattern(each) for each in inner["mask_functions"]]
    known = [each for each in found if each is not None]
    windows = [each.window for each in known if each.window is not None]
    causal = any(each.causal for each in known)
    if len(known) < len(found) or (windows and not causal):
        return None
    return _Pattern(causal, min(windows, default=None), any(each.packed for each in known))


def _mask(**given: Any) -> Any:
    """Mask function in transformers' registry."""
    square = given["q_length"] == given["kv_length"] and not given.get("q_offset") and not given.get("kv_offset")
    if square and not given.get("use_vmap") and (mask := _of_shape(given)) is not None:
        return mask
    if _current.documents is not None:
        _say_once("a mask that is not only causal, windowed or packed is held in full")
    return masking.sdpa_mask(**given)


def _of_shape(given: Mapping[str, Any]) -> DocumentMask | None:
    rows, length, padded = given["batch_size"], given["q_length"], given.get("attention_mask") is not None
    if _current.documents is None and not padded:  # a call by somebody else, on rows that may be plain
        pattern = _pattern(given["mask_function"])
        if pattern is None or pattern.packed:
            return None
        return DocumentMask(Documents.of_lengths([length] * rows, rows), pattern.causal, pattern.window)
    mask = current_mask(given["mask_function"], padded)
    return mask if mask is not None and mask.documents.tokens == rows * length else None


def request(causal: bool, window: int | None, settings: Mapping[str, Any]) -> Request:
    """What a layer asks for. The mask decides about windows, as it does in transformers' SDPA."""
    strange = sorted(
        name for name, value in settings.items()
        if name not in EXPECTED_SETTINGS and value is not None and not isinstance(value, bool | str)
    )  # fmt: skip
    if strange:
        raise UnknownAttention(f"it passes {', '.join(strange)} to attention")
    return Request(
        causal=causal,
        window=window,
        scale=settings.get("scaling"),
        dropout=settings.get("dropout") or 0.0,
        softcap=settings.get("softcap"),
        sinks=settings.get("s_aux"),
    )


def _attention(
    kernel: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' registry, which dictates the signature."""
    if not isinstance(attention_mask, DocumentMask):
        if settings.get("s_aux") is not None or settings.get("softcap") is not None:
            return by_mask(query, key, value, attention_mask, request(True, None, settings)), None
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return output, None
    ask, choice = request(attention_mask.causal, attention_mask.window, settings), CHOICES[kernel]
    if reason := choice.why_not(query, ask):
        _say_once(f"attention runs document by document instead of by {kernel}: {reason}")
    return attend(choice, query, key, value, attention_mask.documents, ask).contiguous(), None


@functools.cache
def _say_once(line: str) -> None:
    print(line)


_find_packed: Callable[[torch.Tensor], torch.Tensor | None] = masking.find_packed_sequence_indices


def _known_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Stands in for `find_packed_sequence_indices` of transformers 5.22.2, which reads from the device.

    The bounds of the current micro-batch are known on the host. Without this the host waits for the device once per
    mask of every forward pass; it can go when transformers takes bounds from its caller.
    """
    documents = _current.documents
    if documents is None:
        return _find_packed(position_ids)
    if len(documents.lengths) == documents.rows or position_ids.numel() < documents.tokens:
        return None  # one document per row; or slices of rows, whose attention has the documents of whole rows
    return documents.numbers(position_ids.device)


def register(wrap: Callable[[Any], Any] = lambda function: function) -> None:
    """Make the attention of every kernel known to transformers; `wrap` keeps a compiler out of it."""
    for kernel, name in NAMES.items():
        ALL_ATTENTION_FUNCTIONS.register(name, wrap(functools.partial(_attention, kernel)))
        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)
    masking.find_packed_sequence_indices = _known_documents


register()


def kernel_of(section: Model) -> str | None:
    """The kernel of a recipe's model on this machine; None: transformers' own attention.

    `BadInput` if it was asked for by name and can't run here.
    """
    asked = section.attention
    if asked in ("eager", "flex") or section.task in ("seq2seq", "image-classification"):
        return None
    if asked == "auto" and _on_recent_gpu():
        return "varlen"
    if asked in ("auto", "sdpa"):
        return "by_document"
    package = CHOICES[asked].package or ""
    if importlib.util.find_spec(package) is None:
        raise BadInput("model.attention", f"{asked} needs the package {package}, which is not installed; use auto")
    if section.precision == "fp32":
        raise BadInput("model.attention", f"{asked} computes in bf16 or fp16; the recipe says fp32; use auto")
    return asked


def _on_recent_gpu() -> bool:
    """Whether torch's flash kernels run here: from Ampere on, so not on V100."""
    return get_accelerator().device_name() == "cuda" and torch.cuda.get_device_capability()[0] >= 8


def without_gpu(asked: Any) -> Any:
    """The attention of a proof on the host in place of one that needs a GPU: the same bounds, another kernel."""
    return "eager" if asked == "eager" else "auto"


def install(model: Any, section: Model) -> None:
    """Make a model use this attention, or say why it keeps transformers' own."""
    _leave_out_padding_check(model)
    kernel = kernel_of(section)
    if kernel is None:
        return
    if reason := why_not(model.config, section.task) if not section.trust_remote_code else "it has code of its own":
        _say_once(f"{model.config.model_type} keeps transformers' attention: {reason}")
        return
    use(model, kernel)


def use(model: Any, kernel: str) -> bool:
    """Make a model use a kernel; False if its type has code of its own for attention."""
    return set_function(model, NAMES[kernel])


def _leave_out_padding_check(model: torch.nn.Module) -> None:
    """Let forward passes not look for padding ids, for which transformers 5.22.2 reads from the device in every pass.

    It does so in gpt2 and others, to recommend an attention mask; padded micro-batches always come with one.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = lambda *given: None


def why_not(config: PretrainedConfig, task: str | None) -> str:
    """Why a model can't use this attention; empty if it can. Tried on a tiny model."""
    try:
        tiny = trial_config(config)
    except Exception as error:  # configs that differ by layer refuse to be read as one
        return f"no tiny model can be made of it: {first_line(error)}"
    return tried("attention", tiny, [task], lambda: _trial(dict(tiny), task))


def _trial(values: dict[str, Any], task: str | None) -> str:
    builders = {"classification": AutoModelForSequenceClassification, "embedding": Embedder}
    builder = builders.get(task or "", AutoModelForCausalLM)
    kind = values.pop("model_type")
    with torch.device("meta"):
        size = sum(p.numel() for p in builder.from_config(AutoConfig.for_model(kind, **values)).parameters())
    if size > LARGEST:
        return f"its tiny model has {size:,} parameters, too many for a trial"
    own, ours = (_tiny(builder, AutoConfig.for_model(kind, **values)) for _ in range(2))
    if not use(ours, "by_document"):
        return "it does not use transformers' registry of attention functions"
    return max((_difference(own, ours, micro) for micro in trial_batches()), key=len)


def _tiny(builder: Any, config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return builder.from_config(config, dtype=torch.float32).eval()


def trial_batches() -> list[MicroBatch]:
    """Rows that are plain, padded on the right (by id 0, that of tiny models), and packed with different bounds."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY - 1, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((5, 7), (3, 6, 3))])
    return [
        MicroBatch(ids, ids).located(),
        MicroBatch(ids * mask, ids, attention_mask=mask).located(),
        MicroBatch(ids, ids, position_ids=positions).located(),
    ]


def _difference(own: Any, ours: Any, micro: MicroBatch) -> str:
    """How results and gradients differ from those of transformers' attention; empty if they do not.

    Packed rows may equal each document alone instead: transformers 5.22.2 mixes packed documents of gpt_oss.
    """
    ways: list[Callable[[], torch.Tensor]] = [lambda: own(**micro.inputs()).logits]
    if micro.position_ids is not None:
        ways.append(lambda: _alone(own, micro))
    differences = []
    for way in ways:
        try:
            expected = outcome(own, way, micro)
        except Exception:
            if micro.attention_mask is None and micro.position_ids is None:
                raise
            continue  # this type takes no such batch, so it is never trained on one
        found = outcome(ours, lambda: forward(ours, micro).logits, micro)
        differences.append(largest_difference(expected, found))
    least = min(differences, default=0.0)
    return "" if least <= TOLERANCE else f"results on {_named(micro)} rows differ by {least:.1e}"


def _alone(model: Any, micro: MicroBatch) -> torch.Tensor:
    """Logits of packed rows, each document in a forward pass of its own."""
    assert micro.documents is not None
    assert micro.input_ids is not None
    parts = torch.split(micro.input_ids.flatten(), list(micro.documents.lengths))
    logits = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in parts])
    return logits.view(*micro.input_ids.shape, -1)


def outcome(model: Any, run: Callable[[], torch.Tensor], micro: MicroBatch) -> list[torch.Tensor | None]:
    """Logits of real tokens, and the gradients of their weighted sum."""
    model.zero_grad()
    logits = run()
    if micro.attention_mask is not None and logits.dim() == 3:
        logits = logits[micro.attention_mask.bool()]
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()  # type: ignore[no-untyped-call]
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def largest_difference(expected: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> float:
    """Largest difference, relative to the largest value of each tensor, or to 1 % of the largest gradient."""
    floor = 1e-2 * max((float(a.abs().max()) for a in expected[1:] if a is not None), default=0.0)
    worst = 0.0
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None:
            continue
        size = max(float(a.abs().max()), floor if place else 1e-30, 1e-30)
        worst = max(worst, float("inf") if b is None else float((a - b).abs().max()) / size)
    return worst if worst == worst else float("inf")


def _named(micro: MicroBatch) -> str:
    return "padded" if micro.attention_mask is not None else "packed" if micro.position_ids is not None else "plain"
