"""What the workers of one run of the tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock


@contextlib.contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder of all workers, which may not exist yet; one of them at a time is in the block."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(str(folder) + ".lock"):
        yield folder
