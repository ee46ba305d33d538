"""Boards that are made of files, with an imitated TensorRT and CUDA (imitated.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.sysroots import (
    Files,
    make,
)

from . import imitated

XAVIER_TRT, ORIN_TRT, ORIN7_TRT = "8.5.2", "10.3.0", "10.16.2"


@dataclass
class Board:
    """One board: run(arguments) is the exit code of the entrypoint on it."""

    root: Path
    cache: Path
    bundle: Path
    sm: int

    def run(self, job: str, *arguments: str) -> int:
        return imitated.on(self.root, self.sm, [job, str(self.bundle), *arguments])

    @property
    def engine(self) -> Path:
        """The one engine in the cache."""
        return next((self.cache / "engines").glob("*/*/engine"))


class Boards:
    """Makes boards out of files."""

    def __init__(self, folder: Path, bundle: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._bundle, self._patch = folder, bundle, patch

    def __call__(
        self, files: Files, tensorrt: str, sm: int = 87, plugins: str | None = None
    ) -> Board:
        cache = self._folder / "cache"
        compiled = str(self._bundle.parent / "compiled")
        for name, value in imitated.environment(
            cache, tensorrt, IMITATED_COMPILED=compiled
        ).items():
            self._patch.setenv(name, value)
        for module in [m for m in sys.modules if m.split(".")[0] in ("tensorrt", "pycuda")]:
            self._patch.delitem(sys.modules, module)
        imitated.plugin_library(cache, plugins or tensorrt, sm)
        return Board(make(self._folder / "board", files), cache, self._bundle, sm)


def the_error(capfd: pytest.CaptureFixture[str]) -> str:
    """What the entrypoint said was wrong: one line, and no traceback."""
    said = capfd.readouterr().err
    assert "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    return error
