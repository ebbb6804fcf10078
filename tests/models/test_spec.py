"""Parameter counts against transformers' own models, against published counts, and bad input of every kind."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.tiny_configs import LAYERS, small, variants
from toolkit.errors import BadInput
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.config_reader import KEYS, defaults, needs_counting
from toolkit.models.spec import WINDOW_EVERY, ModelSpec, load_model_config, read_model_config
from toolkit.plans.job import task_spec
from toolkit.recipe.model_section import Model, Task

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"

PUBLISHED = {
    "bloom-176b": 176_247_271_424,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-27b-text": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "opt-1.3b": 1_315_758_080,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-27b": 27_227_128_320,
    "gemma-7b": 8_537_680_896,
    "gemma-2b": 2_506_172_416,
    "phi-2": 2_779_683_840,
    "phi-4": 14_659_507_200,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "olmo-2-7b": 7_298_617_344,
    "pythia-6.9b": 6_857_302_016,
    "pythia-1.4b": 1_414_647_808,
    "gpt-neox-20b": 20_554_567_680,
    "yi-34b": 34_388_917_248,
    "codellama-34b": 33_743_970_304,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "bloom-7b1": 7_069_016_064,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "starcoder2-7b": 7_173_923_840,
    "gpt-j-6b": 6_050_882_784,
}
"""Tied embeddings counted once; prediction modules that transformers does not build are left out."""


def opt(hidden: int, layers: int) -> int:
    """OPT by hand: 12 h² and 13 h a layer, 50272 tokens, 2048 + 2 positions, one final norm."""
    return layers * (12 * hidden**2 + 13 * hidden) + (50272 + 2050 + 2) * hidden


WORKED = {
    # The hub's file stores the output matrix a second time; transformers ties it to the token table.
    "falcon-7b": 7_217_189_760 - 65024 * 4544,
    "falcon-40b": 60 * (8192 * (2 * 8192 + 1024) + 8 * 8192**2 + 4 * 8192) + (65024 + 2) * 8192,
    "opt-13b": opt(5120, 40),
    "opt-66b": opt(9216, 64),
    "opt-175b": opt(12288, 96),
}
"""Worked by hand, because no exact count of the tied model was found in public."""

LAYER = re.compile(r"(?:.*\.)?(?:layers|layer|h|blocks)\.(\d+)\.")


def built(model_type: str, config: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """All parameters, and those of each layer, of the model that transformers builds."""
    logging.set_verbosity(logging.CRITICAL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**config))
    layers = [0] * LAYERS
    for name, parameter in model.named_parameters():
        if found := LAYER.match(name):
            layers[int(found[1])] += parameter.numel()
    return sum(parameter.numel() for parameter in model.parameters()), tuple(layers)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_count_equals_the_model_that_transformers_builds(model_type: str) -> None:
    for config in variants(model_type):
        spec = read_model_config({"model_type": model_type, **config})
        assert (spec.params, spec.layer_params) == built(model_type, config), config


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_saved_config_reads_like_the_one_it_was_made_from(model_type: str) -> None:
    for size in (0, 1):
        config = small(model_type, size)
        saved = json.loads(CONFIG_MAPPING[model_type](**config).to_json_string(use_diff=False))
        spec = read_model_config({"model_type": model_type, **config})
        found = read_model_config(saved)
        if model_type not in WINDOW_EVERY:  # windows that only transformers' own defaults give
            spec = replace(spec, window=found.window, window_layers=found.window_layers)
        assert found == replace(spec, model_type=saved["model_type"])  # gpt-sw3 is saved as gpt2


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_active_parameters_leave_out_only_experts_that_are_not_visited(model_type: str) -> None:
    spec = read_model_config({"model_type": model_type, **small(model_type, 0)})
    if spec.experts:
        unvisited = (spec.experts - spec.experts_per_token) * spec.expert_ffn * spec.hidden
        matrices = (spec.params - spec.active_params) / (spec.moe_layers * unvisited)
        assert 2 <= matrices < 3.1
    else:
        assert spec.layer_active_params == spec.layer_params


def test_generated_defaults_are_current() -> None:
    source = importlib.util.spec_from_file_location("generate", ROOT / "benchmarks" / "generate_model_defaults.py")
    assert source is not None
    assert source.loader is not None
    generate = importlib.util.module_from_spec(source)
    source.loader.exec_module(generate)
    assert generate.TARGET.read_text(encoding="utf-8") == generate.render()


def test_every_model_file_has_a_count_to_meet() -> None:
    assert {file.stem for file in MODELS.glob("*.json")} == set(PUBLISHED) | set(WORKED) | set(HEADED)


HEADED: dict[str, tuple[Task, int, int]] = {
    "bert-base": ("classification", 2, 109_483_778),
    "vit-base": ("image-classification", 1000, 86_567_656),
}
"""Models of other tasks: task, classes, published count."""


@pytest.mark.parametrize("name", HEADED)
def test_known_count_with_the_head_of_a_task(name: str) -> None:
    task, classes, count = HEADED[name]
    config = load_model_config(name, models_dir=MODELS)
    assert task_spec(config, Model(path=name, task=task, num_labels=classes)).params == count


@pytest.mark.parametrize(("name", "count"), sorted((PUBLISHED | WORKED).items()))
def test_known_count(name: str, count: int) -> None:
    assert read_model_config(load_model_config(name, models_dir=MODELS)).params == count


def test_active_parameters_of_known_mixtures() -> None:
    active = {
        name: read_model_config(load_model_config(name, models_dir=MODELS)).active_params / 1e9
        for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
    }
    assert active == pytest.approx(
        {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0, "deepseek-v3": 37.0}, rel=0.02
    )


def test_spec_of_a_grouped_query_model() -> None:
    spec = read_model_config(load_model_config("llama-3-8b", models_dir=MODELS))
    shape = (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab)
    assert shape == (32, 4096, 32, 8, 128, 14336, 128256)
    assert (spec.gated_mlp, spec.tied_embeddings, spec.max_positions, spec.experts) == (True, False, 8192, 0)
    assert spec.embedding_params == 128256 * 4096
    assert spec.head_params == 128256 * 4096 + 4096


def test_spec_of_a_mixture() -> None:
    spec = read_model_config(load_model_config("deepseek-v3", models_dir=MODELS))
    mixture = (spec.experts, spec.experts_per_token, spec.expert_ffn, spec.shared_ffn, spec.moe_layers)
    assert mixture == (256, 8, 2048, 2048, 58)
    assert len(set(spec.layer_params[:3])) == len(set(spec.layer_params[3:])) == 1


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    assert read_model_config({"model_type": "gpt2"}).params == PUBLISHED["gpt2"]
    assert read_model_config({"model_type": "llama"}).params == PUBLISHED["llama-2-7b"]


def test_common_and_native_names_are_the_same_key() -> None:
    common = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    native = {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
    assert read_model_config({"model_type": "gpt2", **common}) == read_model_config({"model_type": "gpt2", **native})


def test_keys_of_older_configs() -> None:
    assert read_model_config({"model_type": "bloom", "n_embed": 48}) == read_model_config(
        {"model_type": "bloom", "hidden_size": 48}
    )


def test_text_part_of_a_composite_model() -> None:
    text = small("llama4_text", 0)
    nested = read_model_config({"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert nested == read_model_config({"model_type": "llama4_text", **text})


def refusal(config: Any) -> BadInput:
    with pytest.raises(BadInput) as raised:
        read_model_config(config)
    return raised.value


def test_unknown_type_names_the_nearest() -> None:
    message = str(refusal({"model_type": "qwen3moe"}))
    assert "qwen3moe" in message
    assert "qwen3_moe" in message


@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ARCHITECTURES)))
def test_type_that_only_transformers_knows_is_counted(model_type: str) -> None:
    if model_type in ("llama4", "qwen3_5", "qwen3_5_moe"):
        assert read_model_config({"model_type": model_type, "text_config": {}}).params > 1e9
    else:
        assert needs_counting(model_type)


def test_all_problems_at_once() -> None:
    config = {"model_type": "llama", "hidden_size": "abc", "num_hidden_layers": -1, "vocab_size": 0, "mlp_bias": 3}
    named = {problem.where for problem in refusal(config).problems}
    assert named == {"hidden_size", "num_hidden_layers", "vocab_size", "mlp_bias"}


@pytest.mark.parametrize(
    ("config", "where", "what"),
    [
        (
            {"model_type": "llama", "num_attention_heads": 7},
            "num_attention_heads",
            "7 does not divide hidden_size 4096",
        ),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads", "does not divide the 32 attention"),
        ({"model_type": "mistral", "num_attention_heads": 4}, "num_key_value_heads", "transformers' default"),
        ({"model_type": "gpt2", "n_head": 7}, "n_head", "does not divide"),
        ({"model_type": "llama", "vocab_size": None}, "vocab_size", "null"),
        ({"model_type": "llama", "hidden_size": 4096.0}, "hidden_size", "4096.0 is not a whole number"),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers", "True is not a whole number"),
        ({"model_type": "llama", "hidden_size": 10**9999}, "hidden_size", "too large to show"),
        ({"model_type": "llama", "num_hidden_layers": 10**6}, "num_hidden_layers", "more than 10000"),
        ({"model_type": "dots1", "num_experts_per_tok": 2}, "n_routed_experts", "needed"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok", "9 is more than the 8 experts"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention", "can't count"),
        ({"model_type": "gpt2", "n_embd": 96, "hidden_size": 48}, "hidden_size", "give one"),
        ({"model_type": "minimax", "layer_types": ["full_attention"]}, "layer_types", "1 entries for 32 layers"),
        ({"model_type": "minimax", "num_hidden_layers": 1, "layer_types": ["x"]}, "layer_types", "full_attention"),
        ({"model_type": "llama4_text", "moe_layers": [-1]}, "moe_layers", "not a list of whole numbers from 0"),
        ({"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": None}}}, "per_layer_config", "head_dim"),
        ({"model_type": "gemma4_text", "per_layer_config": {"0": 3}}, "per_layer_config", "table of tables"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier", "number above 0"),
        ({"model_type": "hy_v3", "mlp_layer_types": 3}, "mlp_layer_types", "not a list of names"),
    ],
)
def test_problem_names_the_key(config: dict[str, Any], where: str, what: str) -> None:
    (problem,) = refusal(config).problems
    assert problem.where == where
    assert what in problem.what


@pytest.mark.parametrize("config", [None, 3, [], {}, {"model_type": 3}, {"model_type": None}, {"text_config": {}}])
def test_no_config_at_all(config: Any) -> None:
    assert "model config" in str(refusal(config))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("sparse"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(KEYS)), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from([*sorted(KEYS), "text_config", "attn_config", "ffn_config"]) | st.text(max_size=8)
types = st.sampled_from(sorted(ARCHITECTURES)) | values
others = st.sampled_from(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ARCHITECTURES)))
"""Types that a process of its own counts, which takes seconds."""


def outcome(config: Any) -> ModelSpec | BadInput:
    """What reading gives; any other exception fails the test."""
    try:
        return read_model_config(config)
    except BadInput as error:
        return error


def assert_counted_or_refused(config: Any) -> None:
    result = outcome(config)
    if isinstance(result, BadInput):
        assert all(problem.where and problem.what for problem in result.problems)
    else:
        assert result.params >= result.active_params > 0


@pytest.mark.slow
@settings(max_examples=800, deadline=None)
@given(st.dictionaries(keys, values, max_size=6), types)
def test_any_mapping_is_counted_or_refused(config: dict[str, Any], model_type: Any) -> None:
    assert_counted_or_refused({**config, "model_type": model_type})


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.dictionaries(keys, values, max_size=6), others)
def test_any_mapping_of_a_type_without_a_row_is_counted_or_refused(config: dict[str, Any], model_type: str) -> None:
    assert_counted_or_refused({**config, "model_type": model_type})


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.data(), st.sampled_from(sorted(ARCHITECTURES)))
def test_small_config_with_one_value_replaced_is_counted_or_refused(data: st.DataObject, model_type: str) -> None:
    config = small(model_type, 0)
    config[data.draw(st.sampled_from(sorted({*config, *KEYS})))] = data.draw(values)
    assert_counted_or_refused({"model_type": model_type, **config})


@pytest.mark.parametrize("key", sorted(KEYS))
@pytest.mark.parametrize("value", ["abc", -2, {"hidden_size": 3}, [1, 2, 3, 4], ["x"] * 4])
def test_each_key_with_a_bad_value_is_counted_or_refused(key: str, value: Any) -> None:
    for model_type, row in ARCHITECTURES.items():
        if key not in {*defaults(model_type).values, *row.reads, *row.refuses}:
            continue
        assert_counted_or_refused({"model_type": model_type, **small(model_type, 0), key: value})


def test_stray_keys_do_not_count() -> None:
    config = {"model_type": "gpt2", **small("gpt2", 0)}
    stray = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 5, "num_experts": "x", "moe_layer_freq": [1]}
    assert read_model_config(config | stray) == read_model_config(config)
