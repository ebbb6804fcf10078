"""Bytes of activations: what layers keep, what their backward pass, head and loss take on top."""

from __future__ import annotations

from toolkit.cost.execution import Execution, layer_shape
from toolkit.cost.operators import LayerShape

SCORES = {"eager": 8.0, "kernels": 2.0, "compiled": 2.0}
"""Stored bytes per attention score: the softmax output, and its fp32 copy in eager Hugging Face attention."""
SCORES_DROPOUT = 3.0
"""Further bytes per score with dropout: the result and its 1-byte mask."""
LOGIT_BYTES = {"eager": 10.7, "kernels": 4.5, "compiled": 10.7}
"""Bytes per logit: 16-bit logits, fp32 copy and gradient in torch; Megatron's loss works in place."""
FP32_LOGIT_BYTES = 12.0
"""Bytes per logit in fp32: logits, probabilities and gradient."""
BLOCK_ELEMENTS, WHOLE_ELEMENTS, SUM_ELEMENTS, LEAST_COLUMNS = 2**25, 2**27, 2**26, 256
"""Sizes of the toolkit's loss, as in `runtime/models/head_loss.py`, which this package can't import (a test compares):
logits of a block, logits that a CPU makes at once, fp32 sums of the hidden states' gradient, columns of a block."""
LAST_NORM_KEPT, LAST_NORM_LIVE = 3, 8
"""Tensors of the final norm, each as wide as the model: kept by its forward pass, and live in its backward pass."""
NORMED_QUERIES = ("qwen3", "qwen3_moe")
"""Model types whose layers normalise queries and keys; other types that do have not been rehearsed."""
PIPELINE_BUFFERS = 2
"""Further tensors per micro-batch in flight: the input that a stage received and the output that it sent (Megatron)."""
OWN_PIPELINE_BUFFERS = 1
"""Under DeepSpeed, where the first stage keeps only its output and the last only its input."""
ARRIVED = 2
"""Tensors that a stage holds when a gradient arrives: the gradient and its activation (counted on the demo)."""
GRADIENTS_OF_ACTIVATIONS = 1.0
"""Gradients of a layer in the backward pass relative to its activations; an allocator does not reuse their memory."""
LIVE_GRADIENTS_OF_ACTIVATIONS = 0.15
"""Their share in live bytes, where activations are freed as gradients come (counted on Hugging Face's Llama)."""
FLASH_STATS_BYTES = 4.0
"""Bytes of the log-sum-exp per head and token."""


def layer_bytes(e: Execution, shape: LayerShape, *, fused: bool = False) -> float:
    """Bytes that one layer keeps for one micro-batch without recompute."""
    tokens, part = e.slice.tokens, e.slice
    residual = residual_bytes(e, shape, fused=fused) / part.residual_parts
    inner = inner_bytes(e, shape, fused=fused) / part.tp
    scale = e.element_bytes / 2
    return tokens * (residual + inner) * scale + score_bytes(e, shape)


def residual_bytes(e: Execution, shape: LayerShape, *, fused: bool) -> float:
    """Bytes per token for inputs and outputs of two norms; dropout adds a mask.

    Eager RMSNorm keeps its input in fp32, the normalised input and the output."""
    eager_rms = e.software.fusion == "eager" and shape.gated and not fused
    norm = (8.0 if e.element_bytes == 2 else 6.0) if eager_rms else 4.0
    masks = 1.0 if e.software.dropout else 0.0
    return 2 * (norm + masks) * shape.hidden


def inner_bytes(e: Execution, shape: LayerShape, *, fused: bool) -> float:
    """Bytes per token for queries, keys, values, attention output and inner tensors of the MLP, in 16 bits."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = 2 if e.sp > 1 else 1  # the output of attention, and the same after the exchange
    attention = 2 * ((1 + outputs) * q + 2 * kv) + FLASH_STATS_BYTES * shape.heads
    gated = 3 if fused or e.software.fusion == "compiled" else 4  # gate, up, silu(gate), product
    tensors = gated if shape.gated else 2
    inner = shape.ffn + shape.experts_per_token * shape.expert_ffn
    routed = 4 * shape.experts_per_token * shape.hidden if shape.experts else 0  # tokens sent to experts and back
    return attention + _normed_bytes(e, q + kv) + 2 * tensors * inner + routed


def _normed_bytes(e: Execution, width: int) -> float:
    """Bytes per token that the norms of queries and keys keep, as those of layers do (rehearsed for Qwen3 8B)."""
    if not e.drops_gradients or e.model.model_type not in NORMED_QUERIES:
        return 0.0
    return (8.0 if e.element_bytes == 2 else 6.0) * width


def score_bytes(e: Execution, shape: LayerShape) -> float:
    """Bytes of stored attention scores of one layer; 0 with flash attention or selective recompute."""
    if e.software.flash or e.scores_dropped:
        return 0.0
    each = SCORES[e.software.fusion] + (SCORES_DROPOUT if e.software.dropout else 0.0)
    return each * e.slice.tokens * e.seq_len * shape.heads / e.tp


def mean_layer_bytes(e: Execution, *, fused: bool = False) -> float:
    """Bytes per layer, averaged over dense and mixture layers; `fused` leaves out what only eager operators keep."""
    experts = e.model.moe_layers / e.model.layers
    dense = layer_bytes(e, layer_shape(e.model, experts=False), fused=fused) if experts < 1 else 0.0
    mixed = layer_bytes(e, layer_shape(e.model, experts=True), fused=fused) if experts > 0 else 0.0
    return dense * (1 - experts) + mixed * experts


def kept_bytes(e: Execution, layers: int, in_flight: float) -> float:
    """Activation bytes of `layers` layers that the micro-batches in flight keep until their backward pass."""
    inputs = layer_input_bytes(e)
    each = OWN_PIPELINE_BUFFERS if e.drops_gradients else PIPELINE_BUFFERS
    buffers = each * inputs * in_flight if e.pp > 1 else 0.0
    kept = e.recompute.kept
    if kept == 1.0:
        return layers * mean_layer_bytes(e) * in_flight + buffers
    each_layer = inputs + kept * mean_layer_bytes(e, fused=True) if kept else inputs
    return layers * each_layer * in_flight + buffers


def layer_input_bytes(e: Execution) -> float:
    """Bytes of the hidden states of one micro-batch on a device."""
    return e.element_bytes * e.slice.tokens * e.model.hidden / e.slice.residual_parts


def live_bytes(e: Execution) -> float:
    """Further bytes for the layer in the backward pass: gradients, recomputed activations and output."""
    if not e.drops_gradients:
        return (1 - e.recompute.kept + GRADIENTS_OF_ACTIVATIONS) * mean_layer_bytes(e)
    again = 1 - e.recompute.kept
    output = layer_input_bytes(e) if e.pp == 1 else 0.0  # in a pipeline, counted as the received input
    return (again + LIVE_GRADIENTS_OF_ACTIVATIONS) * mean_layer_bytes(e) + again * output


def logit_bytes(e: Execution) -> float:
    """Bytes of head and loss on the last stage: logits, their fp32 copy and gradient, or one block of them.

    The toolkit's loss also makes the gradient of the head's weights, which other software counts as a gradient.
    """
    if e.drops_gradients and loss_in_blocks(e):
        return _block_loss_bytes(e) + head_gradient_bytes(e)
    own = e.element_bytes == 4 or e.drops_gradients  # the toolkit's loss takes fp32 logits; 16-bit ones are freed
    each = FP32_LOGIT_BYTES if own else LOGIT_BYTES[e.software.fusion]
    return each * e.slice.tokens * e.model.vocab / e.tp


def loss_in_blocks(e: Execution) -> bool:
    """Whether the toolkit's head computes the loss block by block (`runtime/models/head_loss.py`)."""
    most = WHOLE_ELEMENTS if e.cluster.device.backend == "cpu" else BLOCK_ELEMENTS
    return e.tp > 1 or e.slice.tokens * e.model.vocab > most


def head_gradient_bytes(e: Execution) -> float:
    """Bytes of the gradient of the head's weights; under adapters the head is frozen."""
    return 0.0 if e.lora_rank else e.element_bytes * e.model.vocab * e.model.hidden / e.tp


def _block_loss_bytes(e: Execution) -> float:
    """Bytes of the backward pass of the loss in blocks: sums of the hidden states' gradient, and one block."""
    tokens, hidden, width = e.slice.tokens, e.model.hidden, e.element_bytes
    chunk = min(tokens, SUM_ELEMENTS // hidden)  # longer sequences take two passes
    block = min(max(BLOCK_ELEMENTS, LEAST_COLUMNS * chunk), chunk * e.model.vocab / e.tp)
    copy = width if width < 4 else 0  # a block's gradient is rounded to the precision of the run
    work = max((4 + copy) * block, width * (block + chunk * hidden))
    return 4 * chunk * hidden + work + (width * tokens * hidden if chunk < tokens else 0.0)


def last_norm_bytes(e: Execution, tensors: int) -> float:
    """Bytes of `tensors` tensors of the norm between the last layer and the head."""
    return tensors * layer_input_bytes(e)
