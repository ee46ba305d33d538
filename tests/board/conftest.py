"""A small model's bundle for every Jetson, exported once, with what PyTorch gave."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from edgepool.exporter.export import Options, export
from edgepool.quantize import quantize
from edgepool.quantize.gate import Limits
from edgepool.quantize.quantize import quantize_bundle
from tests.runtime.fakes import config
from tests.runtime.models import TEMPLATE, write_checkpoint

TARGETS = ("jetson-agx-xavier", "jetson-agx-orin", "jetson-agx-orin-jp7")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "board"
    with FileLock(str(folder) + ".lock"):
        if not (folder / "bundle").exists():
            (folder / "compiled").mkdir(parents=True, exist_ok=True)  # see fake_tensorrt.py
            model = config(chat_template=TEMPLATE, eos_token_ids=(256,), max_context=2048)
            write_checkpoint(folder / "model.pt", model, scale=3.0)
            export(folder / "model.pt", Options(output=folder / "bundle", targets=TARGETS))
    return folder / "bundle"


@pytest.fixture(scope="module")
def quantized(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same bundle with its INT8 graphs."""
    copy = Path(shutil.copytree(exported, tmp_path_factory.mktemp("int8") / "bundle"))
    quantize_bundle(copy, quantize.Options(limits=Limits(perplexity=10, agreement=80)))
    return copy


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy to do something to."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
