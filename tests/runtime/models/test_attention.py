"""Attention inside documents: kernels, bounds, and no tensor over all pairs of tokens."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.errors import BadInput
from toolkit.models.spec import OWN_ATTENTION
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.data.packing import check_isolated
from toolkit.runtime.data.prefetch import Share, global_batch
from toolkit.runtime.data.samples import Synthetic
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.layers.recompute import recompute_layers
from toolkit.runtime.models import attention, attention_kernels
from toolkit.runtime.models.attention import NAMES, forward, why_not
from toolkit.runtime.models.attention_kernels import CHOICES, Request, attend
from toolkit.runtime.models.build import build_model, find_layers
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

LENGTHS = (5, 7, 2, 3, 8, 3)
"""Two rows of 14 tokens."""
BOUNDS = [0, 5, 12, 14, 17, 25, 28]


def packed() -> MicroBatch:
    ids = torch.randint(3, 120, (2, 14), generator=torch.Generator().manual_seed(0))
    return MicroBatch(ids, ids, position_ids=torch.cat([torch.arange(n) for n in LENGTHS]).view(2, 14))


def alone(net: Any, micro: MicroBatch) -> torch.Tensor:
    assert micro.input_ids is not None
    parts = micro.input_ids.flatten().split(LENGTHS)
    return torch.cat([net(input_ids=ids[None], use_cache=False).logits[0] for ids in parts]).view(2, 14, -1)


def test_bounds_of_packed_padded_and_plain_rows() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    ids = torch.zeros((2, 4), dtype=torch.long)
    found = {
        "packed": packed().located().documents,
        "padded": MicroBatch(ids, ids, mask).located().documents,
        "plain": MicroBatch(ids, ids).located().documents,
    }
    lengths = {name: documents.lengths for name, documents in found.items() if documents}
    assert lengths == {"packed": LENGTHS, "padded": (3, 1, 2, 2), "plain": (4, 4)}
    assert found["packed"] is not None
    assert found["packed"].bounds.tolist() == BOUNDS
    assert found["packed"].numbers(torch.device("cpu")).tolist() == [
        [0] * 5 + [1] * 7 + [2] * 2,
        [3] * 3 + [4] * 8 + [5] * 3,
    ]
    assert found["plain"] is not None
    assert found["plain"].runs == [(2, 4)], "rows of one length are one batch"


def test_the_prefetch_thread_makes_the_bounds() -> None:
    import numpy as np

    made = global_batch(Synthetic(vocab=50, seq_len=8), np.arange(4), Share(replica=0, replicas=1, micro_batch=2))
    assert [micro.documents and micro.documents.lengths for micro in made] == [(8, 8), (8, 8)]


def naive(query: Any, key: Any, value: Any, lengths: list[int], ask: Request) -> torch.Tensor:
    """Attention document by document with all scores written out, independent of the code under test."""
    outputs, start = [], 0
    for length in lengths:
        q, k, v = (tensor[start : start + length].transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], 0) for tensor in (k, v))
        scores = q @ k.transpose(1, 2) * (ask.scale or q.shape[-1] ** -0.5)
        if ask.softcap:
            scores = ask.softcap * torch.tanh(scores / ask.softcap)
        apart = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = torch.ones_like(apart, dtype=torch.bool)
        seen &= (apart >= 0) if ask.causal else seen
        seen &= (apart < ask.window) if ask.window else seen
        scores = scores.masked_fill(~seen, float("-inf"))
        if ask.sinks is not None:
            scores = torch.cat([scores, ask.sinks.view(-1, 1, 1).expand(-1, length, 1)], -1)
        outputs.append((scores.softmax(-1)[..., :length] @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


REQUESTS = {
    "causal": Request(),
    "both ways": Request(causal=False),
    "window": Request(window=9, scale=0.3),
    "soft cap": Request(softcap=2.0),
    "sinks and window": Request(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), window=3),
}


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("name", list(REQUESTS))
def test_sdpa_per_document_equals_written_out_scores(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 25, 8), (2, 2, 25, 8), (2, 2, 25, 6))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    documents = Documents.of_lengths((11, 11, 3, 20, 5), 2)
    found = attend(CHOICES["by_document"], *tensors, documents, REQUESTS[name])  # type: ignore[misc, arg-type]
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
    expected = naive(*flat, list(documents.lengths), REQUESTS[name]).view(2, 25, 4, 6)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_on_the_host_are_one_node_with_the_bits_of_sdpa(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, generator = Documents.of_lengths((11, 11, 3, 20, 5), 2), torch.Generator().manual_seed(0)
    shapes = ((2, 4, 25, 8), (2, 2, 25, 8), (2, 2, 25, 8))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    results = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(attention_kernels, "_is_for_host_kernel", lambda *call: False)
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        output = attention_kernels.by_document(*flat, documents, Request(causal=causal, scale=0.3))
        assert ("HostDocuments" in type(output.grad_fn).__name__) is at_once
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Recorder:
    """Stands in for a GPU kernel: records its bounds and computes by them."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **how: Any
    ) -> torch.Tensor:
        assert torch.equal(cu_q, cu_k)
        assert cu_q.dtype == torch.int32
        assert max_q == max_k
        window = how["window_size"]
        causal = how.get("causal", window[1] == 0)
        self.calls.append((cu_q.tolist(), max_q))
        scale = how.get("scale", how.get("softmax_scale"))
        ask = Request(causal=causal, window=window[0] + 1 or None, scale=scale, softcap=how.get("softcap") or None)
        return naive(q, k, v, cu_q.diff().tolist(), ask)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(attention_kernels, "varlen_attn", recorder)
    monkeypatch.setattr(attention_kernels, "HALF", (torch.float32,))
    attention_kernels._package.cache_clear()
    for name in ("flash_attn", "flash_attn_interface"):
        package: Any = types.ModuleType(name)
        package.flash_attn_varlen_func = recorder
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(attention, "_on_recent_gpu", lambda: True)
    return recorder


@pytest.mark.parametrize("asked", ["auto", "flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_gpu_kernels_get_the_documents_of_all_rows(asked: Any, kind: str, recorder: Recorder) -> None:
    own = model(kind, **({"sliding_window": 4} if kind == "mistral" else {}))
    net = build_model(replace(own, attention=asked, precision="bf16"), seed=0).eval()
    plain = build_model(replace(own, attention="eager"), seed=0).eval()
    with torch.no_grad():
        found, expected = forward(net, packed()).logits, alone(plain, packed())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert recorder.calls == [(BOUNDS, 8)] * len(find_layers(net)[1])


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("llama", "auto"), ("llama", "sdpa"), ("llama", "eager"), ("gemma2", "auto"), ("gpt_oss", "auto")],
)
def test_documents_on_the_host_equal_each_alone(kind: str, asked: Any) -> None:
    net = build_model(replace(model(kind), attention=asked), seed=0).eval()
    with torch.no_grad():
        torch.testing.assert_close(forward(net, packed()).logits, alone(net, packed()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "flex"])
def test_the_proof_takes_a_kernel_that_runs_here(asked: Any) -> None:
    check_isolated(replace(model("llama"), attention=asked))


def test_recomputed_layers_keep_their_own_bounds() -> None:
    """As in a pipeline: another micro-batch runs forward before the first one's layers are recomputed."""
    net = build_model(model("llama"), seed=0).train()
    plain = build_model(model("llama"), seed=0).train()
    recompute_layers(net)
    first, other = packed(), MicroBatch(packed().input_ids, packed().labels)
    loss = forward(net, first).logits.square().sum()
    forward(net, other)
    loss.backward()
    forward(plain, first).logits.square().sum().backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("asked", "precision", "reason"),
    [
        ("flash_attention_2", "bf16", "needs the package flash_attn"),
        ("flash_attention_3", "bf16", "needs the package flash_attn_interface"),
    ],
)
def test_a_kernel_that_is_not_installed_is_refused(asked: Any, precision: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        build_model(replace(model("llama"), attention=asked, precision=precision), seed=0)


def test_flash_attention_in_fp32_is_refused(recorder: Recorder) -> None:
    with pytest.raises(BadInput, match="computes in bf16 or fp16"):
        build_model(replace(model("llama"), attention="flash_attention_2", precision="fp32"), seed=0)


def test_a_type_with_attention_of_its_own_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    attention._say_once.cache_clear()
    net = build_model(model("mpt"), seed=0)
    assert net.config._attn_implementation not in NAMES.values()
    assert "mpt keeps transformers' attention: it does not use" in capsys.readouterr().out


TOKENS = 148
"""More than a block of queries, and unlike every other size of the tiny models."""


class NoSquares(TorchDispatchMode):
    """Fails at a tensor with two dimensions of the sequence length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(tensor) and sum(size % TOKENS == 0 and size > 0 for size in tensor.shape) > 1:
                raise AssertionError(f"{func} makes a tensor of shape {tuple(tensor.shape)}")
        return result


def long_batch(data: str, rows: int = 2) -> MicroBatch:
    ids = torch.randint(3, 120, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 130] * (rows // 2))[:, None]).long()
    positions = torch.cat([torch.arange(135), torch.arange(13)]).expand(rows, TOKENS).contiguous()
    return MicroBatch(ids, ids, mask if data == "padded" else None, positions if data == "packed" else None)


SIZES: dict[str, Any] = {"max_position_embeddings": 256}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 20},
    "gemma2": SIZES | {"sliding_window": 20},
    "gpt_oss": SIZES | {"sliding_window": 20},
    "gpt2": SIZES | {"n_positions": 256},
    "qwen3_moe": SIZES,
    "deepseek_v3": SIZES | {"num_key_value_heads": 4},
    "bloom": {},
}


@pytest.mark.parametrize("data", ["packed", "padded", "plain"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_tensor_over_all_pairs_of_tokens(kind: str, data: str) -> None:
    net = build_model(model(kind, **KINDS[kind]), seed=0).train()
    micro = long_batch(data).located()
    with NoSquares():
        forward(net, micro).logits.square().mean().backward()


class NoReads(TorchDispatchMode):
    """Fails where the host reads a value, for which it would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_forward_pass_reads_nothing_from_the_device(kind: str) -> None:
    """gpt2 looks for padding ids where the config names one."""
    net = build_model(model(kind, **SIZES, pad_token_id=1), seed=0).train()
    with NoReads():
        forward(net, long_batch("packed").located()).logits.square().mean().backward()


def test_the_guard_against_squares_sees_a_mask() -> None:
    net = build_model(replace(model("llama", **SIZES), attention="eager"), seed=0)
    with NoSquares(), pytest.raises(AssertionError, match="148, 148"):
        forward(net, long_batch("packed").located())


def step_without_squares(section: Model, plan: Plan) -> None:
    """One step as a rank."""
    config = deepspeed_config(plan, ADAM, params=10**6, backend="cpu")
    spec = EngineSpec(model=section, train=ADAM, plan=plan, deepspeed=config, schedule=make_schedule(ADAM, 4))
    engine = build_engine(spec, current_world())
    batch = [long_batch("packed", plan.micro_batch).located() for _ in range(plan.grad_accum)]
    with NoSquares():
        engine.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2, precision="fp32"),
        Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"),
        Plan(strategy="pipeline", pp=2, micro_batch=2, grad_accum=2, precision="fp32"),
        Plan(strategy="sequence_parallel", sp=2, micro_batch=4, precision="fp32"),
    ],
    ids=lambda plan: plan.strategy,
)
def test_no_strategy_makes_a_tensor_over_all_pairs(plan: Plan) -> None:
    section = model("mistral", **KINDS["mistral"])
    failure = first_failure(call_on_ranks(step_without_squares, section, plan, nproc=plan.devices))
    assert failure is None, f"{failure.reason}\n{failure.details}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_sinks_and_soft_caps_are_split_by_sequence(kind: str) -> None:
    section = model(kind, sliding_window=5)
    plan = Plan(strategy="sequence_parallel", sp=2, micro_batch=4, precision="fp32")
    assert_same(run(section, ONE, data="packed"), run(section, plan, data="packed"))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "bloom", "falcon", "gptj", "gpt_neo"])
def test_generation_with_a_cache_gives_the_tokens_of_transformers_attention(kind: str) -> None:
    section = model(kind, sliding_window=4) if kind in ("gemma2", "gpt_oss") else model(kind)
    ids = torch.arange(5, 15)[None]
    found = []
    for asked in ("auto", "eager"):
        net = build_model(replace(section, attention=asked), seed=0).eval()  # type: ignore[arg-type]
        how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        found.append(net.generate(ids, attention_mask=torch.ones_like(ids), **how).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["bloom", "mpt", "gptj", "falcon", "xglm", "llama", "gpt2", "opt"])
def test_the_planner_knows_which_types_compute_all_scores_themselves(kind: str) -> None:
    own = "registry" in why_not(AutoConfig.for_model(kind), None)
    assert own == (kind in OWN_ATTENTION)
