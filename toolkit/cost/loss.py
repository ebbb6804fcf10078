"""Bytes of head and loss: complete logits, one block of them, or the logits that are compared with a teacher's."""

from __future__ import annotations

from toolkit.cost.execution import Execution

LOGIT_BYTES = {"eager": 10.7, "kernels": 4.5, "compiled": 10.7}
"""Bytes per logit: 16-bit logits, fp32 copy and gradient in torch; Megatron's loss works in place."""
FP32_LOGIT_BYTES = 12.0
"""Bytes per logit in fp32: logits, probabilities and gradient."""
TEACHER_LOGITS = 5
"""Tensors in fp32 as large as the logits where they are compared with a teacher's, when that goes backward: by
temperature, without kept tokens, and three of a log-sum-exp's gradient. One more is the cross-entropy's gradient, in
the precision of the run (rehearsed)."""
BLOCK_ELEMENTS, WHOLE_ELEMENTS, SUM_ELEMENTS, LEAST_COLUMNS = 2**25, 2**27, 2**26, 256
"""Sizes of the toolkit's loss, as in `runtime/models/head_loss.py`, which this package can't import (a test compares):
logits of a block, logits that a CPU makes at once, fp32 sums of the hidden states' gradient, columns of a block."""
GATHERED_TEXTS = 2
"""Tensors of all tokens, as wide as the model, where sequence ranks gather complete texts: states and gradient."""


def logit_bytes(e: Execution) -> float:
    """Bytes of head and loss on the last stage: logits, their fp32 copy and gradient, or one block of them.

    The toolkit's loss also makes the gradient of the head's weights, which other software counts as a gradient.
    """
    if e.whole_logits:
        each = 4.0 * TEACHER_LOGITS + e.element_bytes
        return each * e.slice.tokens * e.model.vocab  # every tensor rank has all of them
    if e.drops_gradients and loss_in_blocks(e):
        return _block_loss_bytes(e) + head_gradient_bytes(e)
    own = e.element_bytes == 4 or e.drops_gradients  # the toolkit's loss takes fp32 logits; 16-bit ones are freed
    each = FP32_LOGIT_BYTES if own else LOGIT_BYTES[e.software.fusion]
    if e.complete_texts and e.sp > 1:
        return e.sp * e.slice.tokens * (each * e.model.vocab / e.tp + GATHERED_TEXTS * e.element_bytes * e.model.hidden)
    return each * e.slice.tokens * e.model.vocab / (1 if has_own_encoder(e) else e.tp)


def loss_in_blocks(e: Execution) -> bool:
    """Whether the toolkit's head computes the loss block by block (`runtime/models/head_loss.py`)."""
    most = WHOLE_ELEMENTS if e.cluster.device.backend == "cpu" else BLOCK_ELEMENTS
    return not (e.whole_logits or has_own_encoder(e)) and (e.tp > 1 or e.slice.tokens * e.model.vocab > most)


def has_own_encoder(e: Execution) -> bool:
    """Whether the toolkit trains an encoder-decoder: its loss takes complete logits, on every tensor rank."""
    return e.drops_gradients and e.model.encoder_layers > 0


def head_gradient_bytes(e: Execution) -> float:
    """Bytes of the gradient of the head's weights; under adapters the head is frozen."""
    return 0.0 if e.lora_rank else e.element_bytes * e.model.vocab * e.model.hidden / e.tp


def _block_loss_bytes(e: Execution) -> float:
    """Bytes of the backward pass of the loss in blocks: sums of the hidden states' gradient, and one block."""
    tokens, hidden, width = e.slice.tokens, e.model.hidden, e.element_bytes
    chunk = min(tokens, SUM_ELEMENTS // hidden)  # longer sequences take two passes
    block = min(max(BLOCK_ELEMENTS, LEAST_COLUMNS * chunk), chunk * e.model.vocab / e.tp)
    copy = width if width < 4 else 0  # a block's gradient is rounded to the precision of the run
    if chunk == tokens and block < tokens * e.model.vocab / e.tp:
        copy *= 2  # that of the block before is still there
    work = max((4 + copy) * block, width * (block + chunk * hidden))
    return 4 * chunk * hidden + work + (width * tokens * hidden if chunk < tokens else 0.0)
