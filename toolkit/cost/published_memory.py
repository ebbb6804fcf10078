"""Memory of published rows: what each of the three figures that sources publish would be."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from toolkit.cost.activations import GRADIENTS_OF_ACTIVATIONS, live_bytes, mean_layer_bytes
from toolkit.cost.calibration import Calibration
from toolkit.cost.communication import stage_params
from toolkit.cost.estimate import DEVICE_SHARE
from toolkit.cost.execution import Execution
from toolkit.cost.loss import LOGIT_BYTES
from toolkit.cost.memory import device_bytes
from toolkit.cost.optimizer_step import state_shards
from toolkit.cost.published import sparing
from toolkit.cost.published_rows import MISSING, NO, YES, PublishedRow
from toolkit.cost.start import QUANTIZED_BYTES

LINEAR_LOSS_BYTES = 2.0
"""Bytes per logit where head and loss are one operator: not all at once, but the largest chunks and their gradients."""
WHOLE_LOGITS_BYTES = 2.0
"""Further bytes with sharded weights and adapters, where all logits are made in 16 bits nevertheless (measured by
fms-acceleration on 2 and 4 devices with three batch sizes; neither without adapters nor on one device)."""
CHUNKED_BYTES = 1.5
"""Bytes per logit of a loss in eight chunks (torchtitan): 12 bytes for those of one chunk."""
IN_PLACE_BYTES = 4.5
"""Bytes per logit of a loss kernel that overwrites the logits with their gradient (Composer)."""
MEGATRON_BYTES, OLD_MEGATRON_BYTES = 8.0, 12.0
"""Bytes per logit of Megatron's fused loss: in 16 bits, an fp32 copy that becomes the gradient, and that in 16 bits.
Its loss without fusion keeps the probabilities in fp32, too."""
PARALLEL_LOSS_BYTES = 17.0
"""Bytes per logit of torch's loss over tensor-parallel logits, which is not compiled: copy, probabilities and gradient
in fp32, logits and gradient in 16 bits."""
UPCAST_BYTES = 8.0
"""Bytes per logit of a fused loss under Hugging Face models, which copy logits to fp32 first."""
COMPILED_BYTES = 10.0
HUGGING_FACE_BYTES = 12.0
"""Bytes per logit of Hugging Face's own loss: in 16 bits, fp32 copy, its gradient, and that in 16 bits."""
PLAIN_LOSS_BYTES = 8.0
"""The same for its GPT-2 family, which computes the loss in 16 bits."""
DROPPED_BYTES = 2.0
"""Bytes per input of an adapter that layers keep: dropout makes a copy of it."""
UPCAST_KEPT = 2.0
"""Inputs of layers that full recompute keeps where peft has made norms, and so the residual stream, fp32."""
ADAPTER_BYTES = 4.0
"""Bytes per input of an adapter in the layer that is recomputed: peft copies it to fp32, the adapters' precision."""
KBIT_KEPT = 1.3
"""Activations that layers over 4-bit weights keep, relative to others: bitsandbytes' matmul keeps its own input, also
where the weight needs no gradient (an estimate; LitGPT's LoRA and QLoRA of one model differ by 1.3 to 1.7)."""


OFFLOADED_KEPT, SOME_OFFLOADED_KEPT = 0.1, 0.6
"""Share of the kept activations on the device where they are offloaded, or those of some operators are (estimates)."""


@dataclass(frozen=True)
class _Parts:
    """Bytes of a row by what they are."""

    params: float
    grads: float
    states: float
    passing: float
    """Activations, logits, gathered weights and buckets: gone when the update begins."""

    @property
    def live(self) -> float:
        """All bytes at the peak of the passes."""
        return self.params + self.grads + self.states + self.passing


def _loss_bytes(row: PublishedRow, e: Execution) -> float:
    """Bytes per logit of a row's loss."""
    if e.software.fused_loss == "linear":
        return LINEAR_LOSS_BYTES + (WHOLE_LOGITS_BYTES if e.lora_rank and e.zero_stage == 3 else 0.0)
    if "chunk" in row.text("fused_ce").lower():
        return CHUNKED_BYTES
    if e.software.fused_loss and e.software.fused_accumulation:
        return MEGATRON_BYTES
    if e.software.fusion == "kernels" and not e.software.fused_loss:
        return OLD_MEGATRON_BYTES
    if e.software.fused_loss:
        return UPCAST_BYTES if e.software.unpadded_vocab else IN_PLACE_BYTES
    if e.software.fusion == "compiled":
        return PARALLEL_LOSS_BYTES if e.tp > 1 and not e.software.fused_accumulation else COMPILED_BYTES
    if not e.model.gated_mlp and e.software.unpadded_vocab:
        return PLAIN_LOSS_BYTES
    return HUGGING_FACE_BYTES if e.software.unpadded_vocab else LOGIT_BYTES[e.software.fusion]


def figure_kind(row: PublishedRow) -> str:
    """What a row's memory figure is: `allocated` or `reserved` by torch, or that of the `driver`."""
    told = f"{row.text('mem_kind')} {'' if row.text('mem_kind') else row.text('notes')}".lower()
    if "reserved" in told or (not row.text("mem_kind") and "torchtitan" in row.text("framework").lower()):
        return "reserved"
    return "allocated" if re.search(r"allocated|\(torch\)", told) else "driver"


def predicted_memory(row: PublishedRow, e: Execution, cal: Calibration) -> dict[str, float]:
    """Predicted bytes of a row: `allocated` and `reserved` by torch, as the `driver` reports them, and `needed`.

    The allocator reserves more than it needs while there is room, and no more than the device has.
    """
    if e.expert_tp == 1:  # experts that are not sliced: as if they were distributed over fewer ranks
        e = replace(e, ep=max(1, e.ep // e.tp))
    parts = _parts(row, e, cal)
    live = max(_passes(e, parts) if _trains_in_torch(row, e) else parts.live, _update(row, e, parts))
    fixed = cal.context_bytes + cal.collective_bytes * _communicators(e)
    needed = live * (1 + cal.fragmentation)
    room = e.cluster.device.memory_bytes * DEVICE_SHARE - fixed
    reserved = max(needed, min(live * (1 + cal.reserved), room))
    return {"allocated": live, "reserved": reserved, "driver": reserved + fixed, "needed": needed + fixed}


def _communicators(e: Execution) -> int:
    """Groups of ranks that a rank belongs to, each with buffers of the collectives library."""
    return sum(ranks > 1 for ranks in (e.replicas, e.tp, e.pp, e.ep))


def _parts(row: PublishedRow, e: Execution, cal: Calibration) -> _Parts:
    """Bytes by part, with the data types and the loss that the row states."""
    used = device_bytes(e, cal)
    params, grads, states = float(used.params), float(used.grads), float(used.optimizer)
    if e.quantized_base and e.model.experts:  # before transformers 5, experts were linear layers, too
        params = (QUANTIZED_BYTES * sum(e.model.layer_params) + 4 * e.model.embedding_params) / state_shards(e)
    elif e.quantized_base and e.zero_stage == 3:
        params = params / state_shards(e) + 2 * QUANTIZED_BYTES * max(e.model.layer_params)  # this layer, the next
    told = row.text("state_dtypes").lower()
    if not e.master_weights:
        grads *= e.element_bytes / e.software.grad_bytes
        states *= 1.5 if "bf16 master" in told else 1.0  # a master in 16 bits is a copy, too
    grads, states = _by_optimizer(row, e, grads, states)
    if e.fp32_params:  # the parameters are the master weights
        grads *= 2 if e.software.grad_bytes == 2 else 1
        params, states = 2 * params, states * 2 / 3
    passes = _pass_bytes(row, e, float(used.logits), float(used.activations))
    return _Parts(params, grads, states, passes + used.gathered + used.buffers)


def _by_optimizer(row: PublishedRow, e: Execution, grads: float, states: float) -> tuple[float, float]:
    """Bytes of gradients and states with the variants of AdamW that a row names."""
    text, master = row.text("optimizer").lower(), 4 if e.master_weights else 0
    plain = 8 if e.master_weights else 2 * e.element_bytes
    moments = 2 if re.search(r"8.?bit", text) else 4 if "moments bf16" in text else plain
    if re.search(r"paged|adafactor", text):  # in unified memory, which torch does not count; or one per row and column
        moments = 0
    states *= (master + moments) / (master + plain)
    return (0.0 if "backward" in text else grads), states


def _pass_bytes(row: PublishedRow, e: Execution, logits: float, activations: float) -> float:
    """Bytes of activations and loss: what layers keep, and the loss or the layer in its backward pass.

    `logits` and `activations` are those of the model, whose sum has the larger of the two.
    """
    live = live_bytes(e)
    kept = activations + logits - max(logits, live)
    if e.software.expert_loop and e.model.experts:  # experts go backward one by one, and free their gradients
        live -= GRADIENTS_OF_ACTIVATIONS[e.software.fusion] * mean_layer_bytes(e)
    loss = logits * _loss_bytes(row, e) / LOGIT_BYTES[e.software.fusion]
    if e.quantized_base and e.recompute.kept == 1.0 and "gptq" not in row.text("method").lower():
        kept *= KBIT_KEPT
    if e.software.fp32_residual and e.recompute.kept == 0.0:
        kept *= UPCAST_KEPT
    if e.lora_rank and e.recompute.kept == 1.0:
        kept += DROPPED_BYTES * _adapter_inputs(e) * e.slice.tokens * e.model.layers
    if e.software.fp32_adapters and e.software.fusion == "eager":
        live += ADAPTER_BYTES * e.slice.adapters * e.model.hidden * e.slice.tokens
    return kept * _on_device(row) + max(loss, live)


def _on_device(row: PublishedRow) -> float:
    """Share of the kept activations that stays on the device, if a row offloads them."""
    text = row.text("act_offload").lower()
    if not text or text in MISSING or text in NO:
        return 1.0
    return OFFLOADED_KEPT if text in YES or "all" in text else SOME_OFFLOADED_KEPT


def _adapter_inputs(e: Execution) -> int:
    """Values per token that the adapters of a layer read; those of queries, keys and values share theirs."""
    mlp = (2 if e.model.gated_mlp else 1) * e.model.hidden + e.model.ffn
    return e.model.hidden + (e.model.hidden if e.lora_targets != "qv" else 0) + (mlp if e.lora_targets == "all" else 0)


FOREACH = re.compile(r"(?=.*(trainer|fsdp1|accelerate))(?!.*(deepspeed|composer|compile))")
"""Frameworks that update with torch's `foreach` AdamW, which makes a temporary copy of all updated parameters."""
FLATTENED = 14.0
"""Bytes per updated parameter in InternEvo: a flat copy of the gradients, the same in fp32, and two temporary copies
of torch's `foreach` AdamW before version 2.1."""


ONE_BY_ONE = re.compile(r"8.?bit|paged|backward|fused|adafactor")
"""Optimizers that update a tensor at a time, without such a copy."""


def _trains_in_torch(row: PublishedRow, e: Execution) -> bool:
    return bool(FOREACH.search(row.text("framework").lower())) and not e.lora_rank


def _passes(e: Execution, parts: _Parts) -> float:
    """Peak of the backward pass where gradients grow as activations are freed."""
    resident = parts.params + parts.states
    return resident + (max(parts.grads, parts.passing) if e.grad_accum == 1 else parts.grads + parts.passing)


def _update(row: PublishedRow, e: Execution, parts: _Parts) -> float:
    """Peak of the update with the copies that it makes."""
    resident = parts.params + parts.states + parts.grads
    if "internevo" in row.text("framework").lower():
        return resident + FLATTENED * stage_params(e) / state_shards(e)
    copies = _trains_in_torch(row, e) and not ONE_BY_ONE.search(row.text("optimizer").lower())
    return resident + parts.params if copies else 0.0


def least_memory(row: PublishedRow, e: Execution, cal: Calibration) -> float:
    """Bytes that a row needs at least."""
    return predicted_memory(row, sparing(row, e), cal)["needed"]
