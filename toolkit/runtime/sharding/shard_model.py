"""Tensor shards of a model: apply styles to a skeleton, and check that no gradient is left partial."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from toolkit.errors import ToolkitError
from toolkit.runtime.models.head_loss import HeadLoss, Transform, install
from toolkit.runtime.models.loss import Loss, summed_loss
from toolkit.runtime.models.parameter_shards import is_partial, layout_of
from toolkit.runtime.sharding import styles
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.sharding_plan import DIVIDED, tensor_styles
from toolkit.runtime.sharding.token_shards import share_tokens
from toolkit.runtime.sharding.vocab_parallel_loss import VocabularyLoss, head_name

Style = Callable[[Any, styles.Sharder], None]

BIAS = "alibi"
"""Argument of attention modules: a bias of scores by head (BLOOM)."""
STYLES: dict[str, Style] = {
    "colwise": styles.columns,
    "packed_colwise": lambda module, sharder: styles.columns(module, sharder, packs=2),
    "packed3_colwise": lambda module, sharder: styles.columns(module, sharder, packs=3),
    "colwise_gather_output": lambda module, sharder: styles.columns(module, sharder, gather=True),
    "colwise_rep": lambda module, sharder: styles.columns(module, sharder, gather=True),
    "rowwise": styles.rows,
    "rowwise_split_input": lambda module, sharder: styles.rows(module, sharder, split=True),
    "rowwise_rep": lambda module, sharder: styles.rows(module, sharder, split=True),
    "embedding_rowwise": styles.vocabulary,
    "moe_tp_experts": styles.region,
    "stored": styles.stored,
    "replicated_with_grad_allreduce": styles.partial,
}
"""transformers' names, and two of ours: `packed3_colwise` and `stored`. `_apply` handles two more."""


BESIDE: dict[str, tuple[str, Style]] = {
    "colwise": ("lora_B", styles.beside_columns),
    "packed_colwise": ("lora_B", lambda module, sharder: styles.beside_columns(module, sharder, packs=2)),
    "packed3_colwise": ("lora_B", lambda module, sharder: styles.beside_columns(module, sharder, packs=3)),
    "colwise_gather_output": ("lora_B", lambda module, sharder: styles.beside_columns(module, sharder, gather=True)),
    "colwise_rep": ("lora_B", lambda module, sharder: styles.beside_columns(module, sharder, gather=True)),
    "rowwise": ("lora_A", styles.rows),
    "rowwise_split_input": ("lora_A", lambda module, sharder: styles.rows(module, sharder, split=True)),
    "rowwise_rep": ("lora_A", lambda module, sharder: styles.rows(module, sharder, split=True)),
}
"""Style of a linear → which matrix of its LoRA adapter is sliced, and how; the other one is on every rank.

Under other styles the adapter is on every rank, and the style wraps the linear together with its adapter.
"""

ALIGNED = 8
"""Elements of which torch 2.13's grouped products want multiples in every row: 16 bytes in 16 bits."""
GATHERED_HEADS = ("colwise_gather_output", "colwise_rep")


class PartialGradients(ToolkitError):
    """Tensor ranks have different gradients for a parameter that they all hold."""

    exit_code = 4


def shard(
    model: PreTrainedModel,
    group: TensorGroup,
    owned: Callable[[str], bool] = lambda name: True,
    *,
    sliced_logits: bool = False,
    plain: PreTrainedModel | None = None,
    shares_tokens: bool = False,
    report: Callable[[str], object] = lambda line: None,
) -> Loss:
    """Reduce a skeleton to this rank's shards and return the loss for its logits. Unowned modules stay complete.

    `plain`: a skeleton of the same model without adapters, from which the styles are found, if `model` has adapters.
    `shares_tokens`: between sharded regions each rank holds its share of the tokens.
    """
    plan, attention = tensor_styles(plain or model, group.ranks)
    head = head_name(model)
    sliced_logits = sliced_logits and head is not None and plan.get(head) in GATHERED_HEADS
    if head is not None and sliced_logits:
        loss: Loss = VocabularyLoss(group, _outputs(model.get_submodule(head)))
        plan[head] = "colwise"
    else:
        loss = summed_loss
    modules = dict(model.named_modules())
    sharder = styles.Sharder(model, group)
    named = {id(p): name for name, p in model.named_parameters()}
    chosen = {name: style for name, style in plan.items() if _is_owned(modules, name, named, owned)}
    for name, style in chosen.items():
        if name not in modules:
            _cut_bare(modules, name, style, sharder)
    for name, style in chosen.items():
        module = _under_adapter(modules[name], style, sharder) if name in modules else None
        if module is not None and not styles.is_wrapped(module):
            _apply(model, module, style, f"{name}." if name else "", chosen, sharder)
    _keep_off_odd_widths(model)
    for name in attention:
        if any(other.startswith(f"{name}.") for other in chosen):  # modules of another stage keep all heads
            _divide_heads(modules[name], group)
    if shares_tokens and (wrapped := share_tokens(model, chosen, group, owned)):
        kinds = sorted({name.rpartition(".")[2] for name in wrapped})
        report(f"{', '.join(kinds)} keep all tokens, not shares: they are more than pairs of matrices")
    return loss


def _keep_off_odd_widths(model: PreTrainedModel) -> None:
    """Let experts be computed one by one if slices of theirs are too narrow or odd for grouped products."""
    cut = [p for p in model.parameters() if p.dim() == 3 and layout_of(p) is not None]
    if any(size % ALIGNED for parameter in cut for size in parameter.shape[1:]):
        for config in (model.config, model.config.get_text_config()):
            config._experts_implementation = "eager"


def loss_in_shards(model: PreTrainedModel, group: TensorGroup, loss: VocabularyLoss) -> HeadLoss:
    """Let the shards of a head that is sliced by vocabulary compute the loss."""
    in_head = HeadLoss(Transform.of(model.config), group, loss.start, loss.vocabulary)
    install(model, in_head, group.enter)
    return in_head


def sum_partial_gradients(model: torch.nn.Module, group: TensorGroup) -> None:
    """Sum gradients of full parameters inside sharded regions over tensor ranks, before accumulation."""
    for parameter in model.parameters():
        if is_partial(parameter) and parameter.requires_grad:
            parameter.register_hook(group.sum)  # type: ignore[no-untyped-call]


class ReplicaCheck:
    """Compares gradients of full parameters between tensor ranks, on the first backward pass."""

    TOLERANCE = 1e-2

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], group: TensorGroup) -> None:
        self._group = group
        self._sums: dict[str, torch.Tensor] = {}
        self._whole = [(n, p) for n, p in named if p.requires_grad and layout_of(p) is None]
        self._hooks: list[RemovableHandle] = [
            p.register_hook(self._note(name))  # type: ignore[no-untyped-call]
            for name, p in self._whole
        ]

    def _note(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            values = gradient.detach().double().flatten()
            signs = torch.arange(len(values), device=values.device) % 3 - 1.0
            self._sums[name] = torch.stack([values.sum(), (values * signs).sum(), values.abs().sum()])

        return note

    def finish(self) -> None:
        """After the first backward pass: raise `PartialGradients` with the names of parameters that differ."""
        for hook in self._hooks:
            hook.remove()
        if not self._whole:
            return
        device = self._whole[0][1].device
        nothing = torch.zeros(3, dtype=torch.float64, device=device)
        own = torch.stack([self._sums.get(name, nothing) for name, _ in self._whole])
        ranks = torch.stack(self._group.gather(own))
        spread = (ranks - ranks[0]).abs().amax((0, 2))
        size = ranks[..., 2].amax(0)
        wrong = [
            name for (name, _), bad in zip(self._whole, spread > self.TOLERANCE * size + 1e-12, strict=True) if bad
        ]
        if wrong:
            raise PartialGradients(
                f"{len(wrong)} parameters have different gradients on tensor ranks, first {', '.join(wrong[:4])}; "
                "the shards of this model are wrong: use another strategy, and please report the model type"
            )


def _is_owned(
    modules: dict[str, torch.nn.Module], name: str, named: dict[int, str], owned: Callable[[str], bool]
) -> bool:
    inside = modules[name].parameters() if name in modules else [_bare(modules, name)[2]]
    held = [named[id(parameter)] for parameter in inside]
    return not held or any(owned(parameter) for parameter in held)


def _under_adapter(module: torch.nn.Module, style: str, sharder: styles.Sharder) -> torch.nn.Module:
    """The module that a style is applied to: under a LoRA adapter (peft 0.21) the linear itself, the adapter cut alike.

    Of a head that peft trains as a copy it is the copy.
    """
    inside = module._modules
    copies = inside.get("modules_to_save")
    if isinstance(copies, torch.nn.ModuleDict):
        return copies["default"]
    linear = inside.get("base_layer")
    if linear is None or style not in BESIDE:
        return module
    side, beside = BESIDE[style]
    if "parameter_name" in vars(module):  # peft adds the product of the factors to the weight itself (routers)
        styles.cut_factors(module, sharder, outputs=side == "lora_B", packs=_packs(style))
        return linear
    for adapter in inside[side].values():  # type: ignore[union-attr, operator]
        if not styles.is_wrapped(adapter):
            beside(adapter, sharder)
    return linear


def _cut_bare(modules: dict[str, torch.nn.Module], name: str, style: str, sharder: styles.Sharder) -> None:
    """Shard a bare parameter, which is not the weight of a linear module: experts in one tensor, attention sinks."""
    module, key, parameter, adapters = _bare(modules, name)
    columns = style.endswith("colwise")
    if parameter.ndim == 1 and not columns:
        return
    dim = parameter.ndim - (2 if columns and parameter.ndim > 1 else 1)
    packs = _packs(style)
    for adapter in adapters:
        assert parameter.ndim == 3, "adapters are added to tensors of experts"
        outputs = 2 if getattr(module, "is_transposed", False) else 1
        styles.cut_factors(adapter, sharder, outputs=dim == outputs, packs=packs)
    sharder.cut(module, key, dim, packs=packs)


def _packs(style: str) -> int:
    """Matrices that a parameter of a style holds one below the other."""
    return 3 if style.startswith("packed3") else 2 if style.startswith("packed") else 1


def _bare(modules: dict[str, torch.nn.Module], name: str) -> tuple[Any, str, torch.nn.Parameter, list[Any]]:
    """(module that holds a parameter, name of the parameter there, the parameter, the adapters that are added to it).

    peft 0.21 wraps the module once per parameter that has an adapter.
    """
    parent, _, key = name.rpartition(".")
    module, adapters = modules[parent], []
    while "base_layer" in module._modules:
        adapters += [module] if vars(module).get("parameter_name") == key else []
        module = module._modules["base_layer"]  # type: ignore[assignment]
    parameter = module._parameters[key]
    assert parameter is not None
    return module, key, parameter, adapters


def _apply(
    model: PreTrainedModel,
    module: torch.nn.Module,
    style: str,
    prefix: str,
    chosen: dict[str, str],
    sharder: styles.Sharder,
) -> None:
    if style == "all_reduce":
        bare = any(f"{prefix}{key}" in chosen for key in module._parameters)
        (styles.region if bare else styles.summed)(module, sharder)
    elif style == "mla_kv_a_proj":
        styles.latent_keys(module, sharder, model.config.get_text_config().qk_rope_head_dim)
    else:
        STYLES[style](module, sharder)


def _outputs(linear: Any) -> int:
    return styles.whole_shape(linear.weight)[styles.output_dim(linear)]


def _divide_heads(module: torch.nn.Module, group: TensorGroup) -> None:
    for key in DIVIDED:
        value = getattr(module, key, None)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(module, key, value // group.ranks)
    if BIAS in inspect.signature(module.forward).parameters:
        styles.wrap(module, _with_own_biases(group))


def _with_own_biases(group: TensorGroup) -> Callable[[styles.Forward], styles.Forward]:
    """Hand an attention the biases of this rank's heads: the model makes (rows × heads, 1, keys) for all heads."""

    def forward(inner: styles.Forward) -> styles.Forward:
        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            biases = kwargs[BIAS].unflatten(0, (hidden_states.shape[0], -1)).chunk(group.ranks, 1)[group.index]
            return inner(hidden_states, *args, **{**kwargs, BIAS: biases.flatten(0, 1)})

        return run

    return forward
