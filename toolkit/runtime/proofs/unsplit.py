"""The unsplit side of a proof: a tiny model of the recipe's type, its weights, losses and gradients."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.attention import forward, without_gpu
from toolkit.runtime.models.build import build_model, fill, hollow_model, load_config, weights_of
from toolkit.runtime.models.first_weights import HostWeights
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import Sizes, probe_batches, tiny_config
from toolkit.runtime.sharding.vocab_parallel_loss import follows_head

SEED = 0
RANK = 4
"""Largest rank of a tiny model's adapters."""

Gradients = dict[str, torch.Tensor]


def tiny_heads(axes: Axes) -> int:
    """Attention heads of a tiny model, enough for all ranks; splits with the same number share a tiny model."""
    return max(4, 2 * axes.tp, axes.sp)


def tiny_model_section(section: Model, axes: Axes) -> Model:
    """A tiny model of the same type and switches, with enough heads for all ranks."""
    config = tiny_config(load_config(section), Sizes(heads=tiny_heads(axes)))
    return Model(
        config=config,
        init="scratch",
        precision="fp32",
        attention=without_gpu(section.attention),
        task=section.task,
        num_labels=section.num_labels and max(section.num_labels, 2),  # of one class the loss would always be 0
        lora=section.lora
        and replace(section.lora, rank=min(section.lora.rank, RANK), dropout=0.0, quantize="none", start="zero"),
    )


@dataclass(frozen=True)
class Unsplit:
    """A tiny model in one piece: what its parts start from, and what they must give together."""

    tiny: Model
    kind: torch.dtype
    """Precision of the proof."""
    batches: list[MicroBatch]
    losses: list[float]
    gradients: list[Gradients]
    """By batch, like the losses."""

    @functools.cached_property
    def weights(self) -> HostWeights:
        """The first weights, read once as a rank of a run reads them: not taken from the model that was trained."""
        model = stirred(hollow_model(self.tiny, SEED))
        fill(model, weights_of(model, self.tiny, SEED))
        return HostWeights(model)

    @functools.cached_property
    def sliced_logits(self) -> bool:
        """Whether tensor ranks may keep their slices of the logits."""
        return follows_head(self.tiny)


def unsplit(tiny: Model) -> Unsplit:
    """Train it in float64; in float32 for types whose code mixes in fp32 constants and fails in float64 (xglm)."""
    try:
        return _whole(tiny, torch.float64)
    except Exception:
        return _whole(tiny, torch.float32)


def _whole(tiny: Model, kind: torch.dtype) -> Unsplit:
    used, losses, gradients = [], [], []
    model = exact(stirred(build_model(tiny, SEED)), kind)
    for batch in probe_batches(tiny.task, load_config(tiny)):
        micro = batch.map(lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)
        model.zero_grad(set_to_none=True)
        try:
            loss = summed_loss(forward(model, micro).logits.double(), micro.labels)
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception:
            if micro.attention_mask is None:
                raise
            continue  # this type accepts no mask, so it is never trained on padded data
        used.append(micro)
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return Unsplit(tiny, kind, used, losses, gradients)


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that change its output: new ones are zero, and would hide wrong shards."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def exact(model: PreTrainedModel, kind: torch.dtype) -> PreTrainedModel:
    """In the proof's precision, with experts computed one by one: torch 2.13's grouped products have no float64."""
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    return model.to(kind).train()
