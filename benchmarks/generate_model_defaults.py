"""Writes toolkit/models/defaults.json: the defaults of transformers for each causal language model type.

    python benchmarks/generate_model_defaults.py [--check]

Run it after an update of transformers; a test compares the file with what this writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.models.config_reader import KEYS

TARGET = Path(__file__).parents[1] / "toolkit" / "models" / "defaults.json"


def field_defaults(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Defaults of the fields that count, by native key; those of nested tables as `table.key`."""
    aliases = config_class.attribute_map
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name in KEYS:
            value = None if field.default is dataclasses.MISSING else field.default
            found[prefix + aliases.get(field.name, field.name)] = value
    return found


def nested_defaults(config_class: type) -> dict[str, Any]:
    """Defaults of the tables inside a config that are not whole models of their own."""
    found = {}
    for table, inner in config_class.sub_configs.items():
        if table in ("attn_config", "ffn_config"):
            found |= field_defaults(inner, f"{table}.")
    return found


def row(config_class: type) -> dict[str, Any]:
    """One type: its defaults, and its names for the common keys."""
    aliases = {common: native for common, native in config_class.attribute_map.items() if common in KEYS}
    return {"values": field_defaults(config_class) | nested_defaults(config_class), "aliases": aliases}


def text_types() -> dict[str, str]:
    """Composite types of which the causal language model is the text part alone."""
    found = {}
    for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        text = CONFIG_MAPPING[name].sub_configs.get("text_config")
        if text is not None and MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", "")) == model:
            found[name] = text.model_type
    return found


def render() -> str:
    """The file's text: one type a line, so that a change of transformers reads well in a diff."""
    types = {name: row(CONFIG_MAPPING[name]) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in types.items())
    version, texts = json.dumps(transformers.__version__), json.dumps(text_types())
    return f'{{"transformers": {version},\n"text_types": {texts},\n"types": {{\n{lines}\n}}}}\n'


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if the file is not current")
    if parser.parse_args().check:
        return int(TARGET.read_text(encoding="utf-8") != render())
    TARGET.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
