"""Profiles of hypothesis: a small fixed share in the suite, and ten minutes of random files by `make fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_ALWAYS = {"deadline": 20_000, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=6, derandomize=True, database=None, **_ALWAYS)
settings.register_profile("fuzz", max_examples=3000, **_ALWAYS)
settings.load_profile("suite")
