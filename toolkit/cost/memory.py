"""Memory of the fullest device by part: closed formulas over plan, model and workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toolkit.cost.activations import (
    ARRIVED,
    HEAD_LIVE,
    NORM_LIVE,
    POST_NORMS,
    adapted_bytes,
    backward_bytes,
    embedding_bytes,
    expert_moments,
    kept_bytes,
    layer_input_bytes,
    peak_bytes,
    put_off_bytes,
    reduced_bytes,
    whole_tokens_bytes,
)
from toolkit.cost.calibration import CALIBRATION, Calibration
from toolkit.cost.estimate import Memory
from toolkit.cost.execution import (
    Execution,
    embeds_targets,
    in_flight,
    num_layers,
    of_plan,
    of_stage,
    routed_expert_params,
    stage_experts,
    stage_layer_params,
)
from toolkit.cost.loss import head_gradient_bytes, logit_bytes, loss_in_blocks
from toolkit.cost.optimizer_step import beside_bytes, grad_bytes, largest_tensor, state_bytes, state_shards
from toolkit.cost.start import exchange_bytes, host_bytes, quantized_width, start_bytes
from toolkit.plans.deepspeed_config import MAX_LIVE_ELEMENTS, UPDATE_ELEMENTS, bucket_elements
from toolkit.plans.plan import Job, Plan

BUCKET_ELEMENTS = 5e8
"""DeepSpeed's default `reduce_bucket_size`, as in published figures; the toolkit uses smaller buckets."""
LATE = 0.85
"""Share of the layers that have run when DeepSpeed gathers a frozen head (rehearsed)."""
IN_USE_LAYERS = 1.5
"""Further layers that ZeRO 3 has gathered: the one in use, and on average half of the next."""


def memory(plan: Plan, job: Job) -> Memory:
    """Memory of a plan on its fullest device, by part."""
    return device_bytes(of_plan(plan, job))


def device_bytes(e: Execution, cal: Calibration = CALIBRATION) -> Memory:
    """Memory of the fullest pipeline stage: the first or the last, unless the plan cuts them itself."""
    inner: dict[int, int] = {}  # of alike stages the first has the most micro-batches in flight
    for index in range(1, e.pp - 1) if e.stage_layers else ():
        inner.setdefault(e.stage_layers[index], index)
    first = e.stage_layers[0] if e.stage_layers else 0
    larger = [index for layers, index in inner.items() if layers > first]  # the others hold less than the first stage
    if 0 < e.model.moe_layers < e.model.layers and e.pp > 2:  # the first layers are dense
        larger.append(1)
    if e.model.encoder_layers:  # those of the decoder are larger, and stages of it hold the encoder's output
        larger = list(range(1, e.pp - 1))
    return max((_stage(e, index, cal) for index in sorted({0, *larger, e.pp - 1})), key=lambda stage: stage.total)


def least_bytes(e: Execution) -> float:
    """A lower bound of the first stage's peak: weights, states and what layers keep. Quick, for pruning."""
    e, params = of_stage(e, 0), _stage_params(e, 0)
    kept = kept_bytes(e, num_layers(e, 0), in_flight(e, 0))
    return _param_bytes(e, params) + _own_state_bytes(e, 0, params) + kept


def _stage(e: Execution, index: int, cal: Calibration) -> Memory:
    """Memory of one pipeline stage."""
    e, params = of_stage(e, index), _stage_params(e, index)
    parts = {
        "params": _param_bytes(e, params) + beside_bytes(e, params),
        "grads": grad_bytes(e, params),
        "optimizer": _own_state_bytes(e, index, params),
        "activations": 0.0,
        "logits": logit_bytes(e) if index == e.head_rank else 0.0,  # freed before layers go backward
        "gathered": _gathered(e),
        "buffers": _buffers(e, params),
    }
    if e.cluster.device.backend == "cpu":  # on accelerators this state is in host memory
        parts["optimizer"] += exchange_bytes(e, params)
    kept = kept_bytes(e, num_layers(e, index), in_flight(e, index)) + put_off_bytes(e, num_layers(e, index))
    kept += embedding_bytes(e) if index == 0 else 0.0
    if e.drops_gradients and e.cluster.device.backend != "cpu":
        peak: Moment = max(step_moments(e, index, params, kept, parts), key=lambda moment: sum(moment.values()))
        parts |= peak
    else:
        parts["activations"], parts["logits"] = peak_bytes(
            e, kept, parts["grads"], parts["logits"], last=index == e.head_rank
        )
        parts["buffers"] += _step_peak(e, params, parts)
    live = sum(parts.values())
    parts["overhead"] = _overhead(e, live, cal)
    parts["host"] = host_bytes(e, params, state_bytes(e, params) / state_shards(e))
    start = start_bytes(e, params, _buffers(e, params))
    parts["start"], parts["host_start"] = start.device + _overhead(e, start.device, cal), start.host
    return Memory(**{name: int(size) for name, size in parts.items()})


Moment = dict[str, float]
"""Bytes of the parts that come and go in a step, at one moment of it."""


def step_moments(e: Execution, index: int, params: float, kept: float, parts: Mapping[str, float]) -> Iterator[Moment]:
    """Moments of a step of the toolkit on an accelerator, one of which is the peak; each was one in a rehearsal.

    `kept`: what layers keep for their backward pass. `parts`: gradients and buckets of a complete step.
    """
    step = _Step(e, index, params, kept, parts["grads"], parts["buffers"])
    if index == e.head_rank:
        yield from step.head()
    yield from step.layers()
    yield from step.ends()


class _Step:
    """A step of one pipeline stage."""

    def __init__(self, e: Execution, index: int, params: float, kept: float, grads: float, buckets: float) -> None:
        self.e, self.index, self.kept, self.buckets = e, index, kept, buckets
        self.trained = params * e.trained_share
        experts = stage_experts(e, index) / e.ep / e.expert_cut if e.ep > 1 and not e.lora_rank else 0.0
        self.largest_group = max(experts, self.trained - experts)  # distributed experts are updated by themselves
        self.shard = self.trained / _shards(e, index, params)
        self.grads = grads
        # The gradients of a rank's share of experts are one buffer, made with the first of them (rehearsed).
        stand = (e.zero_stage == 3 and e.pp == 1) or e.accumulates_apart or e.grad_accum > 1 or e.ep > 1
        self.early_grads = grads if stand else 0.0  # one micro-batch: they grow as activations are freed
        self.hidden, self.whole = layer_input_bytes(e), whole_tokens_bytes(e)
        self.head_grad = head_gradient_bytes(e) if loss_in_blocks(e) and index == e.head_rank else 0.0
        self.ahead = 0.0 if e.quantized_base else min(_gathered_now(e), e.element_bytes * MAX_LIVE_ELEMENTS)
        self.tied = e.model.tied_embeddings and e.pp == 1

    def _moment(
        self, activations: float, logits: float = 0.0, buffers: float = 0.0, *, gathered: float | None = None,
        grads: float | None = None,
    ) -> Moment:  # fmt: skip
        weights = _gathered_now(self.e) if gathered is None else gathered
        unpacked = self.e.quantized_base  # a matrix in 16 bits, made for a product, is freed with it
        return {
            "activations": activations + weights if unpacked else activations,
            "logits": logits,
            "buffers": buffers,
            "gathered": 0.0 if unpacked else weights,
            "grads": self.early_grads if grads is None else grads,
        }

    def head(self) -> Iterator[Moment]:
        """The loss, the arrival of the head's gradient, where ZeRO 1 and 2 make their buckets, and the final norm."""
        e, at_head = self.e, self.ahead
        late = e.zero_stage in (1, 2) and e.pp == 1
        yield self._moment(
            self.kept + (HEAD_LIVE - 1) * self.hidden + self.whole, logit_bytes(e), 0.0 if late else self.buckets,
            gathered=at_head,
        )  # fmt: skip
        if self.head_grad and not self.tied:
            yield self._moment(
                self.kept + (HEAD_LIVE - 2) * self.hidden + self.whole,
                self.head_grad + self.whole,
                self.buckets + self._copied(e.model.vocab * e.model.hidden / e.tp),
                gathered=at_head,
            )
        if e.pp == 1 and e.model.model_type not in POST_NORMS:  # a last stage has freed the logits' gradients by then
            live = self.kept + NORM_LIVE * self.hidden
            yield self._moment(live, self.head_grad + self.whole, self.buckets, gathered=at_head)

    def _copied(self, elements: float) -> float:
        """Bytes of copies of a gradient when it arrives: summed in fp32, or kept from being overwritten for offload."""
        if self.e.accumulates_apart:
            return 4.0 * elements
        offloads = self.e.offload != "none" and self.e.zero_stage in (1, 2) and elements > _own_bucket(self.e)
        return self.e.element_bytes * elements if offloads else 0.0

    def layers(self) -> Iterator[Moment]:
        """The last layer's backward pass, and the first full bucket, which is copied for its reduction."""
        e = self.e
        arrived = ARRIVED * e.crossing * self.hidden if self.index != e.head_rank or e.chunks > 1 else 0.0
        waiting = self.head_grad if self.tied else 0.0  # a tied table waits for its other gradient
        copied = self._copied(e.model.hidden * e.model.ffn / e.tp)
        whole, first = _expert_gradients(e), _gathered_now(e, first_layer=True)
        experts = expert_moments(e) if e.model.experts and e.ep > 1 else ()
        # Smaller gradients of experts go into the bucket at once; their down projection holds as much (rehearsed).
        most = max([backward_bytes(e), *(live for live, _ in experts[:1])])
        for live, share in expert_moments(e) if whole else ((most, 0.0),):
            early, late = self.early_grads + share * whole, self.grads + share * whole
            yield self._moment(self.kept + arrived + live, waiting, self.buckets + copied, grads=early)
            yield self._moment(live + arrived, waiting, self.buckets + copied, grads=late, gathered=first)
        if e.lora_rank and e.zero_stage == 3:
            yield self._forward()
        if e.zero_stage and self.buckets and self.trained:
            done = min(1.0, _own_bucket(e) / self.trained)
            width = e.element_bytes if e.element_bytes == 4 else e.software.grad_bytes
            flat = width * min(_own_bucket(e), self.trained)
            flat *= 1 + 2 / state_shards(e) if e.zero_stage == 3 else 1.0  # and a shard of it in fp32
            live = self.kept * (1 - done) + arrived + reduced_bytes(e)
            yield self._moment(live, waiting, self.buckets + flat, gathered=self.ahead)

    def _forward(self) -> Moment:
        """A late layer's forward pass: a frozen head is gathered ahead in addition to DeepSpeed's limit (rehearsed)."""
        head = self.e.element_bytes * self.e.model.head_params / self.e.tp
        live = LATE * self.kept + adapted_bytes(self.e)
        return self._moment(live, 0.0, self.buckets, gathered=_gathered_now(self.e) + head)

    def ends(self) -> Iterator[Moment]:
        """The gradient of the embedding, and the update."""
        e = self.e
        table = e.element_bytes * e.model.vocab * e.model.hidden / e.tp if not e.lora_rank else 0.0
        largest = largest_tensor(e)
        copies = self._copied(table / e.element_bytes)
        if self.index == 0 and self.tied:
            both = self.grads + table
            again = table if e.zero_stage == 3 and e.replicas > 1 else 0.0  # gathered again, whatever the limit
            yield self._moment(table, self.head_grad, self.buckets, grads=both, gathered=max(self.ahead, again))
        if self.index == 0:
            flying = in_flight(e, 0)
            waiting = self.kept * (flying - 1) / flying  # of the other micro-batches
            buffers = self.buckets + copies
            yield self._moment(waiting + table, 0.0, buffers, grads=self.grads, gathered=self.ahead)
        if e.offload != "none" and e.zero_stage in (1, 2):  # the norm of a gradient is taken in float64 as it arrives
            need = self.buckets + copies + 8 * min(self.shard, largest)
        elif e.zero_stage in (1, 2) and e.pp == 1 and not e.accumulates_apart and e.element_bytes == 2:
            need = max(4 * self.shard, 8 * min(self.shard, largest))
        else:
            need = self._update()
        yield self._moment(0.0, 0.0, need, grads=self.grads, gathered=self.ahead)

    def _update(self) -> float:
        """Bytes that the update takes: gradients in fp32, or a copy in 16 bits that is sent."""
        e = self.e
        if e.offload != "none" or not e.master_weights:
            return self.buckets
        if e.accumulates_apart:
            return e.element_bytes * self.largest_group
        need = 4.0 * _updated_at_once(e, self.shard) if e.element_bytes == 2 else 0.0
        flat = e.element_bytes * min(e.bucket_elements or BUCKET_ELEMENTS, self.trained)  # before, for the reduction
        return max(need, flat) if e.zero_stage == 0 else need + self.buckets


def _own_state_bytes(e: Execution, index: int, params: float) -> float:
    """Bytes of optimizer states on the device."""
    return state_bytes(e, params) / _shards(e, index, params) if e.offload == "none" else 0.0


def _shards(e: Execution, index: int, params: float) -> float:
    return state_shards(e, (params, stage_experts(e, index) / e.ep / e.expert_cut))


def _stage_params(e: Execution, index: int) -> float:
    """Parameters of a stage on one tensor-parallel rank; experts are distributed over `ep` ranks."""
    model = e.model
    total = sum(stage_layer_params(e, index))
    total += model.embedding_params if index == 0 else 0
    total += model.vocab * model.hidden if embeds_targets(e, index) else 0
    if index == e.head_rank:
        total += model.head_params
        if e.pp > 1 and model.tied_embeddings and not e.folded:
            total += model.vocab * model.hidden  # the tied table is on the first and on the last stage
    experts = stage_experts(e, index)
    return (total - experts) / e.tp + experts / e.ep / e.expert_cut


def _expert_gradients(e: Execution) -> float:
    """Bytes of gradients of a layer's experts, which are one tensor per matrix: too large for a bucket, they wait."""
    routed = routed_expert_params(e) / e.ep / e.expert_cut
    trained = e.lora_targets == "all" if e.lora_rank else routed / 3 > _own_bucket(e)
    return e.element_bytes * routed if e.zero_stage and trained else 0.0


def _param_bytes(e: Execution, params: float) -> float:
    """Bytes of the weights in the training precision; hpZ keeps a second copy inside its group."""
    second = e.element_bytes * params / e.zero_group if _has_second_copy(e, params) else 0.0
    if e.offload.endswith("_params"):
        return second
    if e.quantized_base:
        return params * quantized_width(e) + e.element_bytes * params * e.trained_share
    adapters = 1 + e.trained_share if e.lora_rank else 1.0
    if e.zero_stage < 3 or e.pp > 1:  # in a pipeline, gathered parameters stay for the step
        return e.element_bytes * params * adapters
    return e.element_bytes * params * adapters / state_shards(e) + second


def _has_second_copy(e: Execution, params: float) -> bool:
    """Whether hpZ makes its second copy: only when a parameter is first released, so not while all stay gathered."""
    return e.zero_stage == 3 and e.zero_variant == "hpz" and params > MAX_LIVE_ELEMENTS


def _largest_layer(e: Execution) -> float:
    """Parameters of the largest layer on a rank."""
    experts = routed_expert_params(e) if e.model.moe_layers else 0
    return (max(e.model.layer_params) - experts) / e.tp + experts / e.ep / e.expert_cut


def _gathered(e: Execution) -> float:
    """Bytes of gathered weights. ZeRO 3: the layer in use and the next one; DeepSpeed keeps more for early reuse.

    QLoRA: a 4-bit matrix is dequantised for its matmul.
    """
    if e.quantized_base:
        return e.element_bytes * e.model.hidden * max(e.model.ffn, e.model.hidden)
    if e.zero_stage < 3 or e.replicas == 1:
        return 0.0
    layer = _largest_layer(e)
    table = max(e.model.embedding_params, e.model.head_params) / e.tp
    if not e.drops_gradients:
        return e.element_bytes * max((IN_USE_LAYERS + 0.5) * layer, table)
    kept = min(MAX_LIVE_ELEMENTS, e.model_params / e.tp)
    return e.element_bytes * max(kept + IN_USE_LAYERS * layer, table)


def _gathered_now(e: Execution, *, first_layer: bool = False) -> float:
    """Bytes of gathered weights on an accelerator: in the head and the last layer, or in the first layer.

    DeepSpeed gathers ahead up to its limit, and then what the layer in use needs. Near the first layer these add up:
    what it has kept there is used again soon, in the next forward pass. A tied table stays for its second gradient.
    """
    if e.quantized_base:
        return _gathered(e)
    if e.zero_stage < 3 or e.replicas == 1:
        return 0.0
    total, table = e.model_params / e.tp, max(e.model.embedding_params, e.model.head_params) / e.tp
    layer = _largest_layer(e)
    if layer > MAX_LIVE_ELEMENTS:  # nothing is gathered ahead, but a table that fits into a bucket stays (rehearsed)
        small = table if table <= bucket_elements(e.model_params, e.tp * e.pp, e.bucket_elements) else 0.0
        return e.element_bytes * min(total, layer + (_own_bucket(e) if first_layer else small))
    held = e.model.tied_embeddings and e.recompute.kept < 1 and table <= MAX_LIVE_ELEMENTS  # a larger one is released
    more = table if held else 0.0
    if first_layer:
        more = layer + _own_bucket(e) / 4  # and the bucket of the next ones
    elif e.model.experts:  # of a layer's experts all are gathered at once
        more = max(more, routed_expert_params(e) / e.ep / e.expert_cut)
    return e.element_bytes * min(total, max(MAX_LIVE_ELEMENTS + more, table))


def _buffers(e: Execution, params: float) -> float:
    """Bytes of the reduction buckets, allocated in full; two of them if reduction overlaps with the backward pass."""
    if e.zero_stage == 0 or e.accumulates_apart or (e.replicas == 1 and not e.drops_gradients):
        return 0.0
    width = 4 if e.element_bytes == 4 else e.software.grad_bytes
    buckets = 2 if e.software.dp_overlap and not (e.drops_gradients and e.zero_stage == 3) else 1
    if e.drops_gradients:  # DeepSpeed 0.19.8 allocates them even if there is nothing to reduce
        return buckets * width * _own_bucket(e)
    return buckets * width * min(BUCKET_ELEMENTS, _largest_bucket(e), params * e.trained_share)


def _own_bucket(e: Execution) -> float:
    return bucket_elements(e.model_params * e.trained_share, e.tp * e.pp, e.bucket_elements)


def _step_peak(e: Execution, params: float, parts: dict[str, float]) -> float:
    """Bytes that the update needs beyond what the backward pass has freed: fp32 gradients and a flat send buffer."""
    if e.offload != "none" or not e.master_weights:
        return 0.0
    trained = params * e.trained_share
    if e.accumulates_apart:  # fp32 gradients are updated in place; a copy in 16 bits is sent
        return max(0.0, e.element_bytes * trained - parts["activations"] - parts["logits"])
    need = 4 * _updated_at_once(e, trained / state_shards(e)) if e.element_bytes == 2 else 0.0
    if e.drops_gradients and e.replicas > 1:
        flat = e.element_bytes * min(_own_bucket(e) if e.zero_stage else e.bucket_elements or BUCKET_ELEMENTS, trained)
        need += flat * (2 if e.zero_stage == 3 and e.cluster.device.backend == "cpu" else 1)  # gloo sums in a copy
    return max(0.0, need - _freed(e, parts))


def _updated_at_once(e: Execution, shard: float) -> float:
    """Elements of a rank's shard whose gradients are copied for one update: under ZeRO 3 a group of tensors."""
    return min(shard, UPDATE_ELEMENTS) if e.drops_gradients and e.zero_stage == 3 and e.pp == 1 else shard


def _freed(e: Execution, parts: dict[str, float]) -> float:
    """Bytes that the backward pass has freed when the update begins; ZeRO 3 still holds gathered parameters."""
    freed = parts["activations"] + parts["logits"]
    if not e.drops_gradients:
        return freed + parts["gathered"]
    in_use = IN_USE_LAYERS * e.element_bytes * max(e.model.layer_params) / e.tp if e.zero_stage == 3 else 0.0
    return (
        freed + in_use + (parts["grads"] if e.zero_stage == 1 and not e.frees_gradients else 0.0)
    )  # ZeRO 1 has moved gradients into shards


def _largest_bucket(e: Execution) -> float:
    """Largest bucket in use: ZeRO 3 reduces layer by layer, so a bucket never holds more than two layers."""
    return 2 * max(e.model.layer_params) / e.tp if e.zero_stage == 3 else BUCKET_ELEMENTS


def _overhead(e: Execution, live: float, cal: Calibration) -> float:
    """Bytes of context, communication buffers and fragmentation; on a CPU only live tensor bytes count."""
    if e.cluster.device.backend == "cpu":
        return 0.0
    fixed = cal.context_bytes + (cal.collective_bytes if e.cluster.devices > 1 else 0.0)
    return fixed + cal.fragmentation * live
