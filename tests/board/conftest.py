"""A small model's bundle for every Jetson, exported once, with what PyTorch gave."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgepool.board import ready as board_ready
from edgepool.engine import gpu
from edgepool.exporter.export import Options, export
from edgepool.quantize import quantize
from edgepool.quantize.gate import Limits
from edgepool.quantize.quantize import quantize_bundle
from edgepool.runtime import device_memory
from tests.engine.sysroots import ORIN
from tests.runtime.fakes import config
from tests.runtime.models import TEMPLATE, write_checkpoint
from tests.workers import shared_folder

from . import imitated
from .boards import ORIN_TRT, Board, Boards

TARGETS = ("jetson-agx-xavier", "jetson-agx-orin", "jetson-agx-orin-jp7")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with shared_folder(tmp_path_factory, "board") as folder:
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


@pytest.fixture
def boards(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> Boards:
    monkeypatch.syspath_prepend(str(imitated.PACKAGES))
    # What `imitated.on` changes is changed back.
    monkeypatch.setattr(gpu, "find", gpu.find)
    monkeypatch.setattr(board_ready, "make_ready", board_ready.make_ready)
    monkeypatch.setattr(device_memory, "DriverGraphs", device_memory.DriverGraphs)
    return Boards(tmp_path, exported, monkeypatch)


@pytest.fixture
def orin(boards: Boards) -> Board:
    return boards(ORIN, ORIN_TRT)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of an Orin on which the engine was built, once it was."""
    return tmp_path_factory.mktemp("engines") / "cache"


@pytest.fixture
def built(orin: Board, engines: Path) -> Board:
    """An Orin with the engine in its cache."""
    if not engines.exists():
        assert orin.run("build") == 0
        shutil.copytree(orin.cache, engines)
    shutil.copytree(engines, orin.cache, dirs_exist_ok=True)
    return orin
