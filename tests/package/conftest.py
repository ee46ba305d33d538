"""A small model's bundle for every Jetson, made once, by whichever worker comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepool.exporter.export import Options, export
from edgepool.model.presets import PRESETS
from edgepool.targets import load_targets
from tests.exporter.models import write_checkpoint
from tests.workers import shared_folder

JETSONS = [name for name, target in load_targets().items() if target.kind == "jetson"]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """edgepool-bundle/ of edgepool-tiny, with a variant for every Jetson."""
    with shared_folder(tmp_path_factory, "package") as folder:
        if not (folder / "edgepool-bundle").exists():
            folder.mkdir(exist_ok=True)
            write_checkpoint(folder / "model.pt", PRESETS["edgepool-tiny"])
            export(folder / "model.pt", Options(folder / "edgepool-bundle", JETSONS))
    return folder / "edgepool-bundle"
