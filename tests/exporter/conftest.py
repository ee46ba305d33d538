"""Exported bundles that several tests look at; they are made once, whichever worker comes first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgepool.config import ModelConfig
from edgepool.exporter.export import Options, export
from tests.workers import shared_folder

from .models import MIXED, SPARSE, config, write_checkpoint

TARGETS = ("jetson-agx-xavier", "jetson-agx-orin", "rtx-4090", "cpu")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.pt of `MIXED` and edgepool-bundle/, exported for TARGETS."""
    return exported(tmp_path_factory, "mixed", config(**MIXED), TARGETS)


@pytest.fixture(scope="session")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.pt of `SPARSE` and edgepool-bundle/, exported for Xavier."""
    return exported(tmp_path_factory, "sparse", config(**SPARSE), ("jetson-agx-xavier",))


def exported(
    factory: pytest.TempPathFactory, name: str, c: ModelConfig, targets: tuple[str, ...]
) -> Path:
    with shared_folder(factory, f"exported-{name}") as folder:
        if not (folder / "edgepool-bundle").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            path = write_checkpoint(folder / "model.pt", c)
            export(path, Options(folder / "edgepool-bundle", targets))
    return folder
