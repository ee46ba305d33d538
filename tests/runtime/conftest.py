"""Exported bundles of these tests, made once, by whichever worker comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from edgepool.checkpoint import import_checkpoint
from edgepool.exporter.export import Options, export
from tests.workers import shared_folder

from .fakes import config
from .models import TEMPLATE, write_checkpoint

CONFIGS = {
    "int8": {"kv_dtype": "int8"},
    "mixed": {"num_layers": 4, "layer_types": ("full", "window", "keypoints", "sparse")},
}


@pytest.fixture(scope="session", params=CONFIGS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model.pt of a small random model and its edgepool-bundle/."""

    def write(path: Path) -> None:
        c = config(chat_template=TEMPLATE, **CONFIGS[request.param])
        write_checkpoint(path, c, scale=3.0)

    return _exported(tmp_path_factory, "runtime-" + request.param, write)


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, imported as `sparse` with a budget of 1,024 tokens, and exported."""

    def write(path: Path) -> None:
        import_checkpoint(smollm2_gguf, path)

    return _exported(tmp_path_factory, "runtime-smollm2", write) / "edgepool-bundle"


def _exported(factory: pytest.TempPathFactory, name: str, write: Callable[[Path], object]) -> Path:
    with shared_folder(factory, name) as folder:
        if not (folder / "edgepool-bundle").exists():
            folder.mkdir(exist_ok=True)
            write(folder / "model.pt")
            export(folder / "model.pt", Options(output=folder / "edgepool-bundle"))
    return folder
