"""Export: Hugging Face loads exactly the master weights, cast to the recipe's precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.harness.tiny_llama import TINY_LLAMA
from tests.conftest import Trainer
from toolkit import cli
from toolkit.checkpoints import store
from toolkit.checkpoints.format import (
    MANIFEST,
    STATE,
    FileEntry,
    canonical_json,
    dump_manifest,
    read_manifest,
    sha256,
)
from toolkit.run_dir.layout import newest
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.models.tiny_models import tiny_of_type

SAVE = ("train.steps=2", "checkpoint.every=2")


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_directory_bit_by_bit(train: Trainer, tmp_path: Path, tied: bool) -> None:
    config = json.dumps({**TINY_LLAMA, "tie_word_embeddings": tied})
    axes = ("strategy.name=zero", "strategy.zero_stage=3", "model.precision=bf16", f"model.config={config}")
    done = train(*SAVE, *axes)
    checkpoint = store.path_of(done.run.checkpoints, 2)
    assert cli.main(["export", str(done.run.path), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    reader = Reader.open(checkpoint)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == reader.index.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, reader.full(name, "weight").to(torch.bfloat16)), name


@pytest.mark.slow
def test_an_exported_directory_is_a_model_path(train: Trainer, tmp_path: Path) -> None:
    done = train(*SAVE, nproc=1)
    assert cli.main(["export", str(done.run.path), str(tmp_path / "out")]) == 0
    again = train("train.steps=1", "model={precision: fp32, path: %s}" % (tmp_path / "out"), nproc=1)
    whole = train("train.steps=3", nproc=1)
    assert again.losses[0] < whole.losses[0]


FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "more"), [("none", ""), ("4bit", ""), ("none", ", dora: true"), ("none", ", start: pissa")]
)
def test_lora_as_adapter_and_merged(train: Trainer, tmp_path: Path, quantize: str, more: str) -> None:
    """Also on a 4-bit base: ZeRO gives the losses of one process, and merging dequantizes the base."""
    from peft import PeftModel

    torch.manual_seed(0)
    sizes = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes' blocks are 64 weights long
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    base.save_pretrained(tmp_path / "base")
    section = f"model={{precision: fp32, path: {tmp_path}/base, lora: {{rank: 4, quantize: {quantize}{more}}}}}"
    one = train(*SAVE, section, "train.lr=0.1", "strategy.name=data_parallel", nproc=1)
    done = train(*SAVE, section, "train.lr=0.1", "strategy={name: zero, zero_stage: 2, micro_batch: 2}")
    assert done.losses == pytest.approx(one.losses, rel=1e-5)
    assert cli.main(["export", str(done.run.path), str(tmp_path / "adapter")]) == 0
    assert cli.main(["export", str(done.run.path), str(tmp_path / "merged"), "--merge"]) == 0
    ids = torch.arange(20)[None]
    bits = {} if quantize == "none" else {"quantization_config": FOUR_BITS}
    trained_on = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **bits)
    if bits:  # what the 4-bit weights stand for: bitsandbytes' own products on a CPU round as bf16 does
        trained_on = trained_on.dequantize()
    adapted = PeftModel.from_pretrained(trained_on, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for each in (base, adapted, merged):  # fp32 products round differently from processor to processor
        each.double()
    with torch.no_grad():
        before, one, other = base(ids).logits, adapted(ids).logits, merged(ids).logits
    assert not torch.allclose(before, one, atol=1e-4)
    assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_adapters_on_distributed_experts_are_a_plain_peft_directory(train: Trainer, tmp_path: Path) -> None:
    from peft import PeftModel

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_of_type("mixtral") | {"vocab_size": 264}))
    base.save_pretrained(tmp_path / "base")
    section = f"model={{precision: fp32, path: {tmp_path}/base, lora: {{rank: 4}}}}"
    one = train(*SAVE, section, "train.lr=0.1", "strategy.name=data_parallel", nproc=1)
    axes = "strategy={name: expert_parallel, ep: 2, zero_stage: 2, micro_batch: 2}"
    done = train(*SAVE, section, "train.lr=0.1", axes)
    assert done.losses == pytest.approx(one.losses, rel=1e-5)
    logits = []
    for name, run in (("one", one), ("experts", done)):
        assert cli.main(["export", str(run.run.path), str(tmp_path / name)]) == 0
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        adapted = PeftModel.from_pretrained(plain, tmp_path / name)
        logits.append(adapted(torch.arange(20)[None]).logits)
    assert cli.main(["export", str(done.run.path), str(tmp_path / "merged"), "--merge"]) == 0
    logits.append(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(torch.arange(20)[None]).logits)
    assert not torch.allclose(base(torch.arange(20)[None]).logits, logits[0], atol=1e-4)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=0)


def test_a_damaged_checkpoint_and_a_full_directory_are_refused(
    train: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(*SAVE, nproc=1)
    checkpoint = store.path_of(done.run.checkpoints, 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    assert cli.main(["export", str(checkpoint), str(tmp_path / "full")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert cli.main(["verify", str(done.run.path)]) == 0
    assert "intact: step 2" in capsys.readouterr().out
    with (checkpoint / "rank-00000-0.safetensors").open("r+b") as file:
        file.truncate(1000)
    for command in (["verify", str(checkpoint)], ["export", str(checkpoint), str(tmp_path / "out")]):
        assert cli.main(command) == 2
        assert "rank-00000-0.safetensors: has 1000 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_state_that_lies_is_refused_by_verify_export_and_resume_alike(
    train: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files have the checksums of the manifest: whoever changed the state changed the manifest, too."""
    run = train("checkpoint.every=4", nproc=1).run
    checkpoint = newest(run.path)
    state = json.loads((checkpoint / STATE).read_text())
    files, step = read_manifest(checkpoint)
    (checkpoint / STATE).write_bytes(canonical_json({**state, "step": -4}))
    changed = FileEntry((checkpoint / STATE).stat().st_size, sha256(checkpoint / STATE))
    (checkpoint / MANIFEST).write_bytes(dump_manifest({**files, STATE: changed}, step))
    for argv in (["verify", str(checkpoint)], ["export", str(checkpoint), str(tmp_path / "out")]):
        assert cli.main(argv) == 2
        assert "step is -4; a number from 0 is required" in capsys.readouterr().err
    again = train("checkpoint={every: 4, resume: auto}", nproc=1, into=run.path, check=False)
    assert again.codes == [2]
    assert "step is -4; a number from 0 is required" in run.log(0).read_text()
