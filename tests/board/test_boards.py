"""The entrypoint on imitated boards: Xavier, Orin with JetPack 6 and 7, PCs; and what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgepool.board.fit import Choice, Model
from edgepool.bundle import Bundle
from edgepool.engine import gpu
from edgepool.engine.memory import RESERVE
from edgepool.plugin_library import NAME
from edgepool.targets import find_target
from tests.engine.sysroots import (
    ORIN,
    ORIN7,
    PC,
    PC_WITH_GPU,
    XAVIER,
    Files,
    make,
    meminfo,
)
from tests.engine.sysroots import plugin_library as record_of_plugins

from . import imitated
from .boards import ORIN7_TRT, ORIN_TRT, XAVIER_TRT, Board, Boards, the_error


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
    assert "speed" not in lines  # the mode is the fastest
    assert {path: path.stat().st_mtime_ns for path in board.bundle.rglob("*")} == before


@pytest.mark.parametrize(
    ("files", "tensorrt", "sm"),
    [(XAVIER, XAVIER_TRT, 72), (ORIN, ORIN_TRT, 87)],
    ids=["xavier", "orin"],
)
def test_int8_with_int8_pages(
    files: Files,
    tensorrt: str,
    sm: int,
    quantized: Path,
    boards: Boards,
    capfd: pytest.CaptureFixture[str],
) -> None:
    board = boards(files, tensorrt, sm)
    board.bundle = quantized
    words = ["--precision", "int8", "--prompt", "Once upon", "--max-new-tokens", "8"]
    assert board.run("run", *words) == 0
    printed = capfd.readouterr()
    assert "INT8 for 2048 tokens" in printed.err
    assert imitated.main(["run", str(quantized), "--backend", "ort", *words]) == 0
    assert printed.out == capfd.readouterr().out


LIB = "/usr/lib/aarch64-linux-gnu"
XAVIER_PLUGINS = f"/home/jetson/.cache/edgepool/plugins/sm_72/{NAME}"
OTHER_TRT = {**XAVIER, f"{LIB}/libnvinfer.so.8.6.1": None}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "sm", "words"),
    [
        (PC, 89, "GPU: no NVIDIA GPU: models run on the CPU (ONNX Runtime)"),
        (OTHER_TRT, 72, "TensorRT: 8.6.1: Jetson AGX Xavier, JetPack 5.1 has 8.5.2.2: sudo apt"),
        (
            {**XAVIER, XAVIER_PLUGINS: record_of_plugins("10.3.0", 72)},
            72,
            "TensorRT is 8.5.2: edgepool build-plugins",
        ),
        (
            {**XAVIER, XAVIER_PLUGINS: record_of_plugins("8.5.2", 72, version="0.0.9")},
            72,
            "plugin library: 0.0.9, TensorRT 8.5.2, sm_72: this is edgepool",
        ),
        (
            {**ORIN, "/etc/nv_tegra_release": "# R41 (release), REVISION: 1.0, GCID: 1\n"},
            87,
            "JetPack: unknown, L4T 41.1.0: edgepool knows JetPack 5, 6 and 7",
        ),
    ],
    ids=["pc", "tensorrt", "plugins", "plugins of another edgepool", "jetpack"],
)
def test_a_machine_that_lacks_something(
    files: Files, sm: int, words: str, boards: Boards, capfd: pytest.CaptureFixture[str]
) -> None:
    board = boards(files, XAVIER_TRT, sm)
    assert board.run("run", "--prompt", "x") == 3
    assert words in the_error(capfd)
    assert board.run("check") == 3
    table = capfd.readouterr().out
    assert re.search(r"^bundle +ok", table, re.M), table  # all that can be looked at, is
    assert max(map(len, table.splitlines())) <= 100


def test_a_bundle_for_another_target(boards: Boards, capfd: pytest.CaptureFixture[str]) -> None:
    board = boards(PC_WITH_GPU, "10.8.0", 89)
    assert board.run("build") == 2
    assert "no variant for l4 (it has jetson-agx-orin, jetson-" in the_error(capfd)


def test_a_damaged_bundle(boards: Boards, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    board = boards(ORIN, ORIN_TRT)
    path = bundle / "variants" / "jetson-agx-orin" / "model.onnx"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    board.bundle = bundle
    assert board.run("build") == 2
    assert "model.onnx: its sha256 is not the one in the manifest" in the_error(capfd)
    assert not (board.cache / "engines").exists()


def test_a_driver_that_finds_no_gpu(
    orin: Board, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files are there, as in a container without the devices' groups."""
    real = imitated.main
    monkeypatch.setattr(imitated, "main", lambda argv: _without_gpu(real, argv))
    assert orin.run("build") == 3
    assert "--group-add video" in the_error(capfd)


def _without_gpu(real: Any, argv: list[str]) -> int:
    gpu.find = lambda: None
    return int(real(argv))


# ------------------------------------------------------------------------------------ memory


def needs(board: Board, batch: int, context: int, precision: str = "fp32") -> Any:
    bundle = Bundle.open(board.bundle)
    model = Model(bundle.config_of, ["fp32", "int8"], "fp32", find_target("jetson-agx-orin"))
    return model.needs(Choice(precision, context, batch))


def test_what_does_not_fit_says_what_to_change(
    boards: Boards, capfd: pytest.CaptureFixture[str]
) -> None:
    board = boards({**ORIN, "/proc/meminfo": meminfo(30.4, 4.0)}, ORIN_TRT)
    assert board.run("build", "--batch", "4096") == 3
    error = the_error(capfd)
    assert "and 2.5 GiB can be used: close other programs, or stop the desktop" in error
    assert "--context " in error
    assert "--adapt" in error
    assert not (board.cache / "engines").exists()


def test_adapt_takes_less_and_says_so(boards: Boards, capfd: pytest.CaptureFixture[str]) -> None:
    board = boards(ORIN, ORIN_TRT)
    enough, wish = (needs(board, 2, n).build_peak for n in (1024, 2048))
    free = ((enough + wish) // 2 + RESERVE) / GIB
    make(board.root, {"/proc/meminfo": meminfo(30.4, free)})
    assert board.run("build", "--batch", "2", "--adapt", "--json") == 0
    printed = capfd.readouterr()
    assert "room: FP32 for 2 x 2048 tokens takes" in printed.err
    assert "trying FP32 for 2 x 1024 tokens" in printed.err
    found = json.loads(printed.out)
    assert (found["context"], found["batch"]) == (1024, 2)
    # Less memory than the build took: the engine is there, and is taken again.
    make(
        board.root,
        {"/proc/meminfo": meminfo(30.4, (needs(board, 2, 1024).total + RESERVE) / GIB + 0.01)},
    )
    assert board.run("build", "--batch", "2", "--adapt") == 0
    assert "from the cache" in capfd.readouterr().err


def test_adapt_takes_int8_first(
    quantized: Path, boards: Boards, capfd: pytest.CaptureFixture[str]
) -> None:
    board = boards(ORIN, ORIN_TRT)
    board.bundle = quantized
    fp32, int8 = (needs(board, 64, 2048, name).build_peak for name in ("fp32", "int8"))
    free = ((fp32 + int8) // 2 + RESERVE) / GIB
    make(board.root, {"/proc/meminfo": meminfo(30.4, free)})
    assert board.run("build", "--batch", "64") == 3
    assert "or --precision int8, or --context" in the_error(capfd)
    assert board.run("build", "--batch", "64", "--adapt") == 0
    assert "trying INT8 for 64 x 2048 tokens" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--adapt"]], ids=["", "adapt"])
def test_a_build_that_linux_ends(
    orin: Board,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("IMITATED_FAILURE", "kill")
    assert orin.run("build", *arguments) == 3
    said = capfd.readouterr().err
    contexts = (2048, 1024) if arguments else (2048,)
    tried = re.findall("^engine: memory ran out while (.*) was built", said, re.M)
    assert tried == ["FP32 for %d tokens" % n for n in contexts]
    assert "error: memory ran out while %s was built: close other" % tried[-1] in said
    assert ("let --adapt choose" in said) == (not arguments)
