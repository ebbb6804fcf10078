"""Imported once by the fork server of a scan: what every worker with adapters would import and build again."""

import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # makes the table of all types, which peft reads
