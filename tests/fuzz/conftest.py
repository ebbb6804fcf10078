"""Profile of hypothesis: a small fixed share in the suite; `make fuzz` has its own settings."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=20_000,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("suite")
