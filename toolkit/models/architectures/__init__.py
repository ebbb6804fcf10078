"""Parameter counts of every model type that the planner knows, one row per type. Imports nothing outside.

A row is exact or absent: tests build each type with transformers and compare it layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.models.architectures.dense import BERT, DENSE, GPT, SEQ2SEQ
from toolkit.models.architectures.mixtures import LATENT, LINEAR, MIXTURES
from toolkit.models.architectures.table_row import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **GPT, **BERT, **SEQ2SEQ, **MIXTURES, **LATENT, **LINEAR}
