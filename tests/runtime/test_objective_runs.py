"""Objectives from recipe to result: a recommender, a teacher's pass that is interrupted, resumed runs, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.objectives import rows
from tests.conftest import Trainer
from toolkit import cli
from toolkit.recipe.file import load_recipe, make_recipe
from toolkit.runtime.corpus.sources import synthetic_sessions
from toolkit.runtime.data.dataset import split
from toolkit.runtime.teacher import PART_ROWS
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 192}  # fmt: skip


def data(kind: str, cache: Path, seq_len: int = 64) -> str:
    return f"data={{path: synthetic, format: {kind}, tokenizer: bytes, seq_len: {seq_len}, cache: {cache}}}"


def test_a_recommender_beats_popularity(train: Trainer, tmp_path: Path) -> None:
    """Recall@10 of the recipe after a third of its steps, against always recommending the most popular items."""
    recipe = load_recipe(ROOT / "recipes" / "recommend_llama-small_data_parallel.yaml")
    given = [f"model.config={json.dumps(recipe.model.config)}", f"data.cache={tmp_path}", "data.path=synthetic"]
    given += ["data.format=pairs", "data.tokenizer=items:1000", "data.seq_len=16", "data.eval_fraction=0.1"]
    given += ["train={objective: contrastive, contrastive: {pooling: last, temperature: 0.1}, global_batch: 128,"
              " steps: 30, lr: 6.0e-3, eval_every: 30}", "strategy.name=data_parallel"]  # fmt: skip
    found = train(*given).summary["eval"]["last"]["recall@10"]
    positives = np.array([row["positive"][0] for row in synthetic_sessions(1000)])
    trained, held_out = split(len(positives), 0.1)
    popular = np.argsort(-np.bincount(positives[trained], minlength=1000), kind="stable")[:10]
    baseline = float(np.isin(positives[held_out], popular).mean())
    assert baseline > 0.05, "popular items are right now and then"
    assert found >= 1.5 * baseline, (found, baseline)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("contrastive", "resume"),
        ("kto", "resume"),
        ("distill", "lora-tp"),
        ("reward", "sp"),
        ("contrastive-bert", "sp"),
    ],
)
def test_a_sample_of_all_objectives_in_all_layouts(tmp_path: Path, objective: str, layout: str) -> None:
    """`python -m benchmarks.objectives` runs them all."""
    ((*_, words, right),) = rows([objective], [layout], tmp_path)
    assert right, words
    assert words.startswith("ok"), words


def test_a_teachers_pass_resumes_and_is_not_trusted_when_damaged(train: Trainer, tmp_path: Path) -> None:
    distill = f"train.distill={{teacher_config: {json.dumps(TINY)}, top_k: 4, ce_weight: 0.5}}"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n} " * 12}) + "\n" for n in range(2 * PART_ROWS)))
    source = f"data={{path: {file}, tokenizer: bytes, seq_len: 32, cache: {tmp_path}}}"
    given = [source, f"model.config={json.dumps(TINY)}", "train.objective=distill", distill]
    alone = train(*given, "strategy.name=data_parallel", nproc=1)
    parts = sorted(tmp_path.glob("teacher-*.safetensors"))
    assert len(parts) > 1
    before = {path: path.read_bytes() for path in parts}
    parts[0].unlink()
    parts[1].write_bytes(before[parts[1]][:-4] + b"\0\1\2\3")
    other = train(*given, "strategy={name: zero, zero_stage: 3}", nproc=2)
    assert other.losses == pytest.approx(alone.losses, rel=2e-5)
    for path, content in before.items():
        assert path.read_bytes() == content, "every row is computed alone, so the bytes are the same"
    assert alone.records[-1]["objective"].keys() == {"kl", "cross_entropy", "agreement"}


@pytest.mark.parametrize("strategy", ["{name: zero, zero_stage: 3}", "{name: tensor_parallel, tp: 2}"])
def test_a_live_teacher_has_the_losses_of_a_cached_one(train: Trainer, tmp_path: Path, strategy: str) -> None:
    """Large weights make a teacher that prefers some tokens: else the divergence is the rounding of two equals."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    teacher = json.dumps({**TINY, **sizes})
    given = [data("chat", tmp_path), f"model.config={json.dumps(TINY)}", "train.objective=distill"]
    given += ["data.eval_fraction=0.1", "train.eval_every=4"]
    kept, live = (
        f"train.distill={{teacher_config: {teacher}, top_k: 4, predictions: {how}}}" for how in ("cached", "live")
    )
    alone = train(*given, kept, "strategy.name=data_parallel", nproc=1)
    before = len(list(tmp_path.glob("teacher-*")))
    found = train(*given, live, f"strategy={strategy}")
    assert found.losses == pytest.approx(alone.losses, rel=2e-5)
    assert found.norms == pytest.approx(alone.norms, rel=1e-4)
    assert found.summary["eval"]["last"]["loss"] == pytest.approx(alone.summary["eval"]["last"]["loss"], rel=2e-5)
    assert len(list(tmp_path.glob("teacher-*"))) == before > 0, "a live teacher writes nothing"


def test_a_live_teacher_in_a_pipeline_is_refused(recipe_mapping: dict[str, Any]) -> None:
    distill = f"train.distill={{teacher_config: {json.dumps(TINY)}, predictions: live}}"
    given = ["data={path: synthetic, format: chat, tokenizer: bytes}", "train.objective=distill", distill]
    given += [f"model.config={json.dumps(TINY)}", "strategy={name: pipeline, pp: 2}", "data.seq_len=64"]
    resolved = resolve(make_recipe(recipe_mapping, given), 2)
    assert resolved.decision.chosen is None
    assert any("a live teacher would need pipeline stages" in one.reason for one in resolved.decision.refused)


def test_another_vocabulary_is_refused(train: Trainer, tmp_path: Path) -> None:
    distill = f"train.distill={{teacher_config: {json.dumps({**TINY, 'vocab_size': 300})}}}"
    given = [data("chat", tmp_path), f"model.config={json.dumps(TINY)}", "train.objective=distill", distill]
    done = train(*given, nproc=1, check=False)
    assert done.codes == [2]
    assert "has 300 tokens, the student has 260; both must have one vocabulary" in done.run.log(0).read_text()


def test_an_exported_embedding_model_has_what_sentence_transformers_reads(train: Trainer, tmp_path: Path) -> None:
    from transformers import AutoModel

    given = [data("pairs", tmp_path), f"model.config={json.dumps(TINY)}", "train.objective=contrastive"]
    done = train(*given, "checkpoint.every=4", "train.contrastive={pooling: last}", nproc=1)
    out = tmp_path / "out"
    assert cli.main(["export", str(done.run.path), str(out)]) == 0
    modules = json.loads((out / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert all((out / module["path"]).is_dir() for module in modules)
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert pooling == {
        "word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True,
        "pooling_mode_cls_token": False,
    }  # fmt: skip
    hidden = AutoModel.from_pretrained(out)(input_ids=torch.arange(8)[None]).last_hidden_state
    assert hidden.shape == (1, 8, 32)
