"""Bytes of activations: what layers keep, what their backward pass, head and loss take on top."""

from __future__ import annotations

from toolkit.cost.execution import Execution, embedded_in_flight, layer_shape
from toolkit.cost.loss import head_gradient_bytes, logit_bytes, loss_in_blocks
from toolkit.cost.operators import LayerShape

SCORES = {"eager": 8.0, "kernels": 2.0, "compiled": 2.0}
"""Stored bytes per attention score: the softmax output, and its fp32 copy in eager Hugging Face attention."""
SCORES_DROPOUT = 3.0
"""Further bytes per score with dropout: the result and its 1-byte mask."""
HEAD_LIVE, NORM_LIVE = 4, 5
"""Tensors as wide as the model beyond those of the layers: while the loss goes backward, and while the final norm does;
one more is the gradient of the loss (rehearsed)."""
LAST_NORM_KEPT, LAST_NORM_LIVE = 3, 8
"""The same on a CPU."""
GATHERED_TOKENS = 2
"""Tensors of all tokens, as wide as the model, when a layer with shares of tokens goes backward: the gathered input of
its first matrices, and the gradient of it or of the layer's output (rehearsed)."""
LIVE_INNER = 2
"""Gradients as wide as the MLP when a layer goes backward: of its inner product and of one factor (rehearsed)."""
NORMED_QUERIES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
"""Model types whose layers normalise queries and keys; other types that do have not been rehearsed."""
WIDE_NORMS = ("gpt_oss", "gemma2", "gemma3", "gemma3_text")
"""Model types whose norms multiply by their weight in fp32, so that the normalised input is kept in fp32."""
SANDWICH_NORMS = ("gemma2", "gemma3", "gemma3_text")
"""Model types with a further norm after attention and after the MLP."""
SINKS = ("gpt_oss",)
"""Model types with attention sinks: keys and values are repeated for every head (rehearsed)."""
BIAS_COLUMNS = {"bloom": 8}
"""Model types whose attention bias is further columns of queries, keys and values, and how many (`BIAS_COLUMNS` of
`runtime/models/attention_kernels.py`). The output without them is one more tensor."""
EXPERT_TENSORS = {"gpt_oss": 7}
"""Tensors as wide as an expert that are kept: gate and up, clamped gate, its sigmoid, their product, up + 1, and the
result. Others keep 4 (rehearsed)."""
EXPERT_BIASES = ("gpt_oss",)
"""Model types whose experts have biases, with which the gradient of the down projection is reduced at once."""
POST_NORMS = ("bert", "roberta", "camembert", "xlm-roberta", "bart", "plbart", "mvp", "blenderbot-small")
"""Model types whose layers end with a norm, which goes backward with its layer, so that none is left for the head."""
EMBEDDING_NORMS = ("bloom", "mbart", *POST_NORMS)
"""Model types with a norm between embedding and layers: it keeps its input, of all tokens (rehearsed)."""
REDUCED_SHARE = 0.7
"""Share of a recomputed layer that is left when a full bucket is reduced."""
EAGER_GELU, EAGER_GELU_TENSORS = ("gpt2",), 5
"""Model types whose activation transformers computes operator by operator (`gelu_new`), and the tensors as wide as the
MLP that a layer keeps then: input, half of it, tanh, 1 + tanh, and the product (rehearsed for GPT-2)."""
T5_GATED_TENSORS = 7
"""The same for the gated MLP of a T5, whose activation is `gelu_new`: gate, up, half of the gate, tanh, 1 + tanh, their
product, and that with up after a dropout (rehearsed)."""
PIPELINE_BUFFERS = 2
"""Further tensors per micro-batch in flight: the input that a stage received and the output that it sent (Megatron)."""
OWN_PIPELINE_BUFFERS = 1
"""Under DeepSpeed, where the first stage keeps only its output and the last only its input."""
OWN_CHUNK_BUFFERS = 2
"""The same per chunk in flight, where most chunks keep both their input and their output (rehearsed)."""
ARRIVED = 2
"""Tensors that a stage holds when a gradient arrives: the gradient and its activation (counted on the demo)."""
GRADIENTS_OF_ACTIVATIONS = {"eager": 1.0, "kernels": 0.25, "compiled": 0.25}
"""Gradients of a layer in the backward pass relative to its activations, in published runs: one per operator, or fewer
where operators are fused (BigScience: memory by micro-batch)."""
LIVE_GRADIENTS_OF_ACTIVATIONS = 0.15
"""Their share in live bytes, where activations are freed as gradients come (counted on Hugging Face's Llama)."""
BIAS_GRADIENTS = 2
"""Further copies of the biases of both attentions when a decoder layer is recomputed (fitted to one run of T5)."""
INPUTS_ON_DEVICE = 2
"""Layer inputs on the device if they are kept on the host: that of the layer in use, and the next one on its way."""
FLASH_STATS_BYTES = 4.0
"""Bytes of the log-sum-exp per head and token."""


def layer_bytes(e: Execution, shape: LayerShape, *, fused: bool = False) -> float:
    """Bytes that one layer keeps for one micro-batch without recompute."""
    tokens, part = e.slice.tokens, e.slice
    residual = residual_bytes(e, shape, fused=fused) / part.residual_parts
    inner = inner_bytes(e, shape, fused=fused) / layer_parts(e)
    scale = e.element_bytes / 2
    if e.residual_shards and e.drops_gradients and shape.experts:
        # Experts compute on all tokens: their gathered input, and tokens sent to them and back (rehearsed for Mixtral).
        inner += (2 + 4 * e.expert_slots * shape.experts_per_token * (1 - 1 / part.tp)) * shape.hidden
    more = score_bytes(e, shape) + _padding_bytes(e, shape) + _adapted_expert_bytes(e, shape)
    return tokens * (residual + inner) * scale + more


def layer_parts(e: Execution) -> int:
    """Tensor ranks that share what is between a layer's matrices; of a T5 they gather it after each (rehearsed)."""
    return 1 if e.drops_gradients and e.model.biased_scores else e.slice.tp


def _padding_bytes(e: Execution, shape: LayerShape) -> float:
    """Bytes of biases that each attention makes from a mask of padding, the same for all heads (rehearsed)."""
    if not e.drops_gradients or not e.model.padding_masks:
        return 0.0
    return (1 + shape.crosses) * e.element_bytes * e.slice.tokens * e.seq_len / e.texts


def _adapted_expert_bytes(e: Execution, shape: LayerShape) -> float:
    """Bytes of experts with their adapters added, which peft 0.21 makes for every pass (rehearsed for Mixtral)."""
    if not e.drops_gradients or not e.lora_rank or e.lora_targets != "all" or not shape.experts:
        return 0.0
    matrices = 3 if shape.gated else 2
    return e.element_bytes * shape.experts * matrices * shape.hidden * shape.expert_ffn / e.ep / e.tp


def residual_bytes(e: Execution, shape: LayerShape, *, fused: bool) -> float:
    """Bytes per token for inputs and outputs of two norms; dropout adds a mask.

    Eager RMSNorm keeps its input in fp32, the normalised input and the output."""
    eager_rms = e.software.fusion == "eager" and e.model.rms_norms and not fused and not _fused_on_host(e)
    norm = (8.0 if e.element_bytes == 2 else 6.0) if eager_rms else 4.0
    after = 0.0
    if eager_rms and e.drops_gradients:
        normed = _normalised_bytes(e)  # for the gradient of the norm's weights, which adapters leave frozen
        norm += (0.0 if e.lora_rank else normed) - 2.0
        if e.model.model_type in SANDWICH_NORMS:
            after = norm - 2.0  # the output is added at once
    elif _fused_on_host(e) and e.model.model_type in SANDWICH_NORMS:
        after = 2.0
    masks = 1.0 if e.software.dropout or (e.drops_gradients and e.model.residual_dropout) else 0.0
    if eager_rms and e.drops_gradients and e.model.biased_scores and e.element_bytes == 2:
        norm += 2.0  # T5's norm multiplies its 16-bit input with fp32 statistics, and keeps both
    frozen = 2.0 if _frozen_mlp(e) else 0.0  # the input of the MLP, which only gradients of its weights need
    return ((2 + shape.crosses) * (norm + after + masks) - frozen) * shape.hidden


def _frozen_mlp(e: Execution) -> bool:
    """Whether the toolkit trains adapters of attention only."""
    return e.drops_gradients and e.lora_rank > 0 and e.lora_targets != "all"


def _normalised_bytes(e: Execution) -> float:
    """Bytes per element of a normalised input, in units of 16 bits for the precision of the run."""
    return 4.0 if e.model.model_type in WIDE_NORMS and e.element_bytes == 2 else 2.0


def _fused_on_host(e: Execution) -> bool:
    """Whether norms are those of `runtime/layers/host_kernels.py`, which keep nothing but their input."""
    return e.drops_gradients and e.element_bytes == 4 and e.cluster.device.backend == "cpu"


def inner_bytes(e: Execution, shape: LayerShape, *, fused: bool) -> float:
    """Bytes per token for queries, keys, values, attention output and inner tensors of the MLP, in 16 bits."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if e.drops_gradients and e.model.model_type in SINKS:
        kv = q
    # The output of attention again after the exchange, and again without the second copy of what documents share.
    copies = int(e.sp > 1) + int(e.shared_prompt > 0)
    on_host = e.cluster.device.backend == "cpu" or not e.drops_gradients
    copies += int(_bias_columns(e) > 0) + int(e.model.encoder_layers > 0 and on_host)  # torch's plain attention copies
    wide = shape.heads * _bias_columns(e)
    attention = (1 + e.shared_prompt + shape.crosses) * _attended_bytes(shape, q + wide, kv + wide) + 2 * copies * q
    gated = 3 if fused or e.software.fusion == "compiled" else 4  # gate, up, silu(gate), product
    plain = EAGER_GELU_TENSORS if e.drops_gradients and e.model.model_type in EAGER_GELU else 2
    if e.drops_gradients and e.model.biased_scores:
        gated = T5_GATED_TENSORS
    frozen = int(_frozen_mlp(e))  # inputs of matrices without gradients are not kept
    tensors = (gated if shape.gated else plain) - frozen
    experts = _expert_tensors(e) - frozen if e.drops_gradients and shape.experts else tensors
    inner = tensors * shape.ffn + experts * e.expert_slots * shape.experts_per_token * shape.expert_ffn
    # Tokens sent to experts and back.
    routed = (4 - 2 * frozen) * e.expert_slots * shape.experts_per_token * shape.hidden if shape.experts else 0
    masks = shape.ffn if e.drops_gradients and e.model.biased_scores and e.model.residual_dropout else 0
    return attention + _normed_bytes(e, q + kv) + 2 * inner + masks + routed


def _attended_bytes(shape: LayerShape, q: int, kv: int) -> float:
    """Bytes per token of queries, keys, values, the output of attention and its statistics, in 16 bits."""
    return 2 * (2 * q + 2 * kv) + FLASH_STATS_BYTES * shape.heads


def _bias_columns(e: Execution) -> int:
    """Further columns per head of queries, keys, values and the output of attention."""
    return BIAS_COLUMNS.get(e.model.model_type, 0) if e.drops_gradients else 0


def _expert_tensors(e: Execution) -> int:
    return EXPERT_TENSORS.get(e.model.model_type, 4 if e.model.gated_mlp else 2)


def _normed_bytes(e: Execution, width: int) -> float:
    """Bytes per token that the norms of queries and keys keep: inputs in fp32 and normalised ones (rehearsed)."""
    if not e.drops_gradients or e.model.model_type not in NORMED_QUERIES:
        return 0.0
    normed = 0.0 if e.lora_rank or _fused_on_host(e) else _normalised_bytes(e)
    return (4.0 if e.element_bytes == 2 else 2.0) * width + normed * width


def score_bytes(e: Execution, shape: LayerShape) -> float:
    """Bytes of stored scores, or their biases, of one layer; 0 with flash attention or selective recompute."""
    if (e.software.flash and not e.model.biased_scores) or e.scores_dropped:
        return 0.0
    each = e.element_bytes if e.software.flash else SCORES[e.software.fusion] + SCORES_DROPOUT * e.software.dropout
    several = 1 + shape.crosses
    if e.drops_gradients and e.software.flash:  # a decoder's own attention has no padding: one bias for all rows
        several = 1 + shape.crosses / e.micro_batch
    return several * each * e.slice.tokens * e.seq_len * shape.heads / layer_parts(e)


def mean_layer_bytes(e: Execution, *, fused: bool = False) -> float:
    """Bytes per layer, averaged over dense and mixture layers; `fused` leaves out what only eager operators keep."""
    experts = e.model.moe_layers / e.model.layers
    plain = layer_shape(e.model, experts=False, crosses=e.crosses)
    dense = layer_bytes(e, plain, fused=fused) if experts < 1 else 0.0
    mixed = layer_bytes(e, layer_shape(e.model, experts=True), fused=fused) if experts > 0 else 0.0
    return dense * (1 - experts) + mixed * experts


def kept_bytes(e: Execution, layers: int, in_flight: float) -> float:
    """Activation bytes of `layers` layers that the micro-batches in flight keep until their backward pass."""
    inputs = layer_input_bytes(e)
    each = OWN_PIPELINE_BUFFERS if e.drops_gradients else PIPELINE_BUFFERS
    if e.chunks > 1 and e.drops_gradients:
        each = OWN_CHUNK_BUFFERS * e.chunks
    buffers = each * e.crossing * inputs * in_flight if e.pp > 1 else 0.0
    kept = e.recompute.kept
    if e.recompute.keeps_products:
        return layers * (inputs + products_bytes(e)) * in_flight + buffers
    if inputs_on_host(e):
        return min(layers * in_flight, INPUTS_ON_DEVICE) * inputs + buffers
    if kept == 1.0:
        return layers * mean_layer_bytes(e) * in_flight + buffers
    each_layer = inputs + kept * mean_layer_bytes(e, fused=True) if kept else inputs
    return layers * each_layer * in_flight + buffers


def embedding_bytes(e: Execution) -> float:
    """Bytes that the first rank keeps before its first layer: inputs of a norm, and masks of a dropout.

    An encoder-decoder embeds twice, and T5 has a norm and a dropout after its encoder, too.
    """
    norm = e.element_bytes if e.model.model_type in EMBEDDING_NORMS else 0
    output = e.element_bytes if e.model.encoder_layers or e.model.model_type in POST_NORMS else 0
    mask = 1 if e.model.embedding_dropout else 0
    each = norm + output + mask
    if e.model.encoder_layers and e.pp == 1:
        each += each + (4 + 2 * e.element_bytes + mask if e.model.biased_scores else 0)
    return each * e.slice.tokens * e.model.hidden * embedded_in_flight(e) if e.drops_gradients else 0.0


def products_bytes(e: Execution) -> float:
    """Bytes per layer of the outputs of matrix products and attention (`selective`); of the last one under ZeRO 3 only.

    Rehearsed: queries, keys, values, the output of attention with its statistics, its projection, and the inputs of
    the MLP's activation, which are kept in place of everything that element-wise operators make of them.
    """
    experts = e.model.moe_layers / e.model.layers
    return sum(
        share * _products(e, layer_shape(e.model, experts=mixed, crosses=e.crosses))
        for share, mixed in ((1 - experts, False), (experts, True))
        if share
    )


def _products(e: Execution, shape: LayerShape) -> float:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = shape.ffn + e.expert_slots * shape.experts_per_token * shape.expert_ffn
    kept = shape.experts and not (e.recompute.repeats_experts and e.drops_gradients)
    outputs = 2 * e.expert_slots * shape.experts_per_token * shape.hidden if kept else 0  # of experts, not summed
    wide = shape.heads * _bias_columns(e)  # queries, keys and values are kept without their columns
    attended = (1 + e.shared_prompt + shape.crosses) * (_attended_bytes(shape, q, kv) + 2 * wide)
    sharded = attended + 2 * (2 if shape.gated else 1) * inner
    tensors = 2 if e.zero_stage == 3 and e.drops_gradients else 1  # DeepSpeed's own linear layer needs the last one
    if e.residual_shards and e.drops_gradients:
        tensors = 0  # computed again, with its reduce-scatter
    whole = 2 * (1 + shape.crosses) * tensors * shape.hidden / e.slice.residual_parts
    return e.slice.tokens * (sharded / layer_parts(e) + whole + outputs) * e.element_bytes / 2


def inputs_on_host(e: Execution) -> bool:
    """Whether layer inputs leave the device; on a CPU host and device are the same memory."""
    return e.recompute.inputs_on_host and e.cluster.device.backend != "cpu"


def kept_share(e: Execution) -> float:
    """Share of a layer's activations that is not computed again in its backward pass."""
    return products_bytes(e) / mean_layer_bytes(e) if e.recompute.keeps_products else e.recompute.kept


def layer_input_bytes(e: Execution) -> float:
    """Bytes of the hidden states of one micro-batch on a device."""
    return e.element_bytes * e.slice.tokens * e.model.hidden / e.slice.residual_parts


def whole_tokens_bytes(e: Execution) -> float:
    """Bytes of the hidden states of one micro-batch with the tokens of all tensor ranks."""
    return e.element_bytes * e.slice.tokens * e.model.hidden


def gathered_tokens_bytes(e: Execution) -> float:
    """Bytes of gathered hidden states while a layer computes on shares of tokens; 0 with complete residuals."""
    return GATHERED_TOKENS * whole_tokens_bytes(e) if e.residual_shards else 0.0


def live_bytes(e: Execution) -> float:
    """Further bytes for the layer in the backward pass: gradients, recomputed activations and output."""
    if not e.drops_gradients:
        return (1 - kept_share(e) + GRADIENTS_OF_ACTIVATIONS[e.software.fusion]) * mean_layer_bytes(e)
    again = 1 - kept_share(e)
    output = layer_input_bytes(e) if e.pp == 1 else 0.0  # in a pipeline, counted as the received input
    if e.model.biased_scores:
        output += BIAS_GRADIENTS * score_bytes(e, layer_shape(e.model, experts=False, crosses=1.0))
    return (again + LIVE_GRADIENTS_OF_ACTIVATIONS) * mean_layer_bytes(e) + again * output


def backward_bytes(e: Execution) -> float:
    """Bytes beyond kept ones while a layer goes backward on an accelerator: recomputed tensors, and gradients."""
    inner = (
        1 if e.model.model_type in POST_NORMS else LIVE_INNER
    )  # the result of the activation is freed before its gradient
    return _recomputed(e) + inner * _inner_gradient(e) + gathered_tokens_bytes(e)


def adapted_bytes(e: Execution) -> float:
    """Bytes of the forward pass of a layer with adapters: two inputs, the MLP's product, and its update twice."""
    return 2 * layer_input_bytes(e) + 3 * _inner_gradient(e)


def expert_moments(e: Execution) -> tuple[tuple[float, float], ...]:
    """Bytes beyond kept ones while a layer's experts go backward, and the share of their gradients that exists then.

    Rehearsed: first the down projection, with all of the layer and gradients of its output and input; then gate and up,
    when the inner tensors are gone but for their gradient. Adapted experts are new tensors in every pass, and so are
    their gradients.
    """
    rows = e.element_bytes * e.slice.tokens * e.expert_slots * e.model.experts_per_token
    inner = rows * e.model.expert_ffn / e.tp
    down = _recomputed(e) + inner + rows * e.model.hidden
    if e.lora_rank:
        return ((down + _adapted_expert_bytes(e, layer_shape(e.model, experts=True)) / 3, 0.0),)
    last = 2 / 3 if e.model.model_type in EXPERT_BIASES else 1.0
    return ((down, 1 / 3), (_recomputed(e) - (_expert_tensors(e) - 2) * inner, last))


def reduced_bytes(e: Execution) -> float:
    """The same while a full bucket is reduced, which is later in a layer's backward pass (rehearsed)."""
    return REDUCED_SHARE * _recomputed(e) + _inner_gradient(e)


def _recomputed(e: Execution) -> float:
    """Bytes of what a layer recomputes, and of its output."""
    again = 1 - kept_share(e)
    output = layer_input_bytes(e) if e.pp == 1 else 0.0  # in a pipeline, counted as the received input
    return again * (mean_layer_bytes(e) + output)


def _inner_gradient(e: Execution) -> float:
    """Bytes of a gradient as wide as the MLP."""
    model = e.model
    inner = max(model.ffn, model.shared_ffn + e.expert_slots * model.experts_per_token * model.expert_ffn)
    inner /= layer_parts(e)
    return e.element_bytes * e.slice.tokens * max(inner, model.hidden)


def last_norm_bytes(e: Execution, tensors: int) -> float:
    """Bytes of `tensors` tensors of the norm between the last layer and the head."""
    return tensors * layer_input_bytes(e)


def peak_bytes(e: Execution, kept: float, grads: float, logits: float, *, last: bool) -> tuple[float, float]:
    """Activation bytes at the peak, not counting gradients, and the bytes of head and loss there.

    The peak is in the head and the loss, in the backward pass of the final norm, or in that of a layer. DeepSpeed frees
    gradients after the update, so with one micro-batch they grow only as activations are freed. A stage that receives
    gradients from the next one also holds these.
    """
    live = live_bytes(e)
    at_head, at_norm = logits, 0.0
    if e.drops_gradients and logits:  # the toolkit's own runs: the final norm is between logits and layers
        at_head, at_norm = _tails(e)
    tail = max(at_head, at_norm)
    if e.drops_gradients and loss_in_blocks(e) and logits and e.pp == 1 and (at_head < tail or tail < live):
        logits = head_gradient_bytes(e) if tail > live else 0.0
    if e.drops_gradients and not last:
        kept += ARRIVED * e.crossing * layer_input_bytes(e)
    stand = e.zero_stage == 3 and e.pp == 1  # its buffer for gradients stays between steps
    if not e.drops_gradients or e.grad_accum > 1 or not last or stand:
        return kept + max(tail, live) - logits, logits
    return max(0.0, max(kept + tail, live + max(kept, grads)) - logits - grads), logits


def _tails(e: Execution) -> tuple[float, float]:
    """Bytes beyond what layers keep, in the toolkit's own runs: in head and loss, and in the final norm after them.

    The last stage of a pipeline has freed the gradients of the logits when the norm goes backward.
    """
    at_norm = last_norm_bytes(e, LAST_NORM_LIVE) + (head_gradient_bytes(e) if loss_in_blocks(e) else 0.0)
    return logit_bytes(e) + last_norm_bytes(e, LAST_NORM_KEPT), at_norm if e.pp == 1 else 0.0


def put_off_bytes(e: Execution, layers: int) -> float:
    """Gradients of the outputs of one chunk's linear layers, which wait for the gradients of their weights (a V)."""
    if not e.folded:
        return 0.0
    model = e.model
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim + model.hidden
    width = attention + (2 if model.gated_mlp else 1) * model.ffn + model.hidden
    return e.element_bytes * e.slice.tokens * width * layers / e.chunks
