"""Fixtures of the whole suite, and one thread per worker (`make test` starts two workers)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import assets

# `make test-full` asks for --hypothesis-profile=full.
for profile, examples in (("quick", 6), ("full", 60)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
settings.load_profile("quick")

# Set before any test module imports torch; nothing here may reach for a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file."""
    return assets.smollm2_gguf()
