"""The entrypoint on imitated boards: Xavier, Orin with JetPack 6 and 7, PCs; and what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgepool.board import ready as board_ready
from edgepool.engine import gpu
from edgepool.plugin_library import NAME
from edgepool.runtime import device_memory
from tests.engine.sysroots import (
    ORIN,
    ORIN7,
    PC,
    PC_WITH_GPU,
    XAVIER,
    Files,
    dpkg,
    make,
    meminfo,
)
from tests.engine.sysroots import plugin_library as record_of_plugins

from . import imitated


@dataclass
class Board:
    """One board: run(arguments) is the exit code of the entrypoint on it."""

    root: Path
    cache: Path
    bundle: Path
    sm: int

    def run(self, job: str, *arguments: str) -> int:
        return imitated.on(self.root, self.sm, [job, str(self.bundle), *arguments])


class Boards:
    """Makes boards out of files."""

    def __init__(self, folder: Path, bundle: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._bundle, self._patch = folder, bundle, patch

    def __call__(
        self, files: Files, tensorrt: str, sm: int = 87, plugins: str | None = None
    ) -> Board:
        cache = self._folder / "cache"
        for name, value in imitated.environment(cache, tensorrt).items():
            self._patch.setenv(name, value)
        for module in [m for m in sys.modules if m.split(".")[0] in ("tensorrt", "pycuda")]:
            self._patch.delitem(sys.modules, module)
        imitated.plugin_library(cache, plugins or tensorrt, sm)
        return Board(make(self._folder / "board", files), cache, self._bundle, sm)


@pytest.fixture
def boards(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> Boards:
    monkeypatch.syspath_prepend(str(imitated.PACKAGES))
    # What `imitated.on` changes is changed back.
    monkeypatch.setattr(gpu, "find", gpu.find)
    monkeypatch.setattr(board_ready, "make_ready", board_ready.make_ready)
    monkeypatch.setattr(device_memory, "DriverGraphs", device_memory.DriverGraphs)
    return Boards(tmp_path, exported, monkeypatch)


XAVIER_TRT, ORIN_TRT, ORIN7_TRT = "8.5.2", "10.3.0", "10.16.2"


@pytest.mark.parametrize(
    ("files", "tensorrt", "sm"),
    [(XAVIER, XAVIER_TRT, 72), (ORIN, ORIN_TRT, 87), (ORIN7, ORIN7_TRT, 87)],
    ids=["xavier", "orin", "orin-jp7"],
)
def test_from_bundle_to_text_on_every_board(
    files: Files, tensorrt: str, sm: int, boards: Boards, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine is built once, in the cache; the bundle, which cannot be written, is only read."""
    board = boards(files, tensorrt, sm)
    before = {path: path.stat().st_mtime_ns for path in board.bundle.rglob("*")}
    words = ["--prompt", "Once upon", "--max-new-tokens", "8"]
    assert board.run("run", *words) == 0
    printed = capfd.readouterr()
    assert "none in the cache yet" in printed.err
    assert "parity: 100.0 %" in printed.err
    assert imitated.main(["run", str(board.bundle), "--backend", "ort", *words]) == 0
    assert printed.out == capfd.readouterr().out
    assert board.run("check", "--json") == 0
    lines = {x["name"]: x["found"] for x in json.loads(capfd.readouterr().out)["lines"]}
    assert lines["engine"].endswith("from the cache")
    assert {path: path.stat().st_mtime_ns for path in board.bundle.rglob("*")} == before
