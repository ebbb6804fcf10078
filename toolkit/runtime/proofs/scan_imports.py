"""Imported once by the fork server of a scan: what its workers would each import and build again.

A type is trained in about thirty processes: its modeling module was a tenth of the CPU time of each.
"""

import contextlib

import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion  # noqa: F401
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

get_checkpoint_conversion_mapping("llama")  # makes the table of all types, which peft reads
for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
    with contextlib.suppress(Exception):  # a type that can't be imported fails in its own worker, with its reason
        getattr(transformers, name)
