"""The fast tests again, under AddressSanitizer and UBSan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins import emulated

FILES = ("attributes", "bad_input", "build_phase", "enqueue", "lifetime")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_under_watch(file: str) -> None:
    emulated.run_tests(str(Path(__file__).with_name(f"test_{file}.py")), "asan")
