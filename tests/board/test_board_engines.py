"""The engine of an imitated board: failed, foreign, damaged and killed builds, and its cache."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from edgepool import bundle as bundles
from edgepool.board import engine
from tests.engine.sysroots import (
    ORIN,
    make,
)

from . import imitated
from .boards import ORIN_TRT, Board, Boards, the_error


@pytest.mark.parametrize(
    ("failure", "words"),
    [("none", "built no engine: no implementation for node 7"), ("abort", "signal 6")],
)
def test_a_build_that_fails(
    orin: Board,
    failure: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("IMITATED_FAILURE", failure)
    assert orin.run("build") == 1
    assert words in capfd.readouterr().err
    assert list((orin.cache / "engines").glob("*/*/engine")) == []


def test_an_engine_of_another_tensorrt_is_built_again(
    built: Board, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And kept until the new one is there."""
    before = built.engine.read_bytes()
    monkeypatch.setenv("IMITATED_TENSORRT", "10.3.1")
    for module in ("tensorrt", "pycuda.driver", "pycuda"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv("IMITATED_FAILURE", "none")
    assert built.run("build") == 1
    assert "it was built by another TensorRT" in capfd.readouterr().err
    assert built.engine.read_bytes() == before
    monkeypatch.delenv("IMITATED_FAILURE")
    assert built.run("build") == 0
    assert built.engine.read_bytes() != before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "no record"])
def test_an_engine_that_cannot_be_trusted_is_built_again(
    built: Board, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(built.engine.read_bytes())
    if damage == "truncated":
        built.engine.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        built.engine.write_bytes(data)
    elif damage == "foreign":
        (built.cache / "engines.json").unlink()
    else:
        (built.engine.parent / "engine.json").unlink()
    words = {
        "truncated": "damaged",
        "flipped": "its sha256 is not the recorded one",
        "foreign": "not built by this user",
        "no record": "none in the cache yet",
    }
    assert built.run("build") == 0
    said = capfd.readouterr().err
    assert words[damage] in said
    assert "built in" in said


def test_a_cache_that_cannot_be_written(
    built: Board,
    orin: Board,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An engine that is there runs all the same."""
    monkeypatch.setattr(
        engine, "os", SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK)
    )
    assert built.run("run", "--prompt", "x", "--max-new-tokens", "2") == 0
    capfd.readouterr()
    shutil.rmtree(built.cache / "engines")
    assert built.run("build") == 2
    assert "cache: the cache cannot be written (read-only): mount a folder" in the_error(capfd)


def test_a_cache_without_room(
    orin: Board, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        engine.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000)
    )
    assert orin.run("build") == 2
    assert "cache: no space left for the engine: it takes 0.0 GiB" in the_error(capfd)


CAN_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount")
@pytest.mark.parametrize(
    ("mount", "words"),
    [
        ("mount --bind {0} {0} && mount -o remount,ro,bind {0}", "cannot be written (read-only)"),
        ("mkdir {0}/engines && mount -t tmpfs -o size=64k none {0}/engines", "no space left on"),
    ],
    ids=["read-only", "full"],
)
def test_a_real_mount(orin: Board, mount: str, words: str) -> None:
    """The file systems are there for one process only, which has namespaces of its own."""
    command = [sys.executable, "-m", "tests.board.imitated", str(orin.root), "87", "build"]
    steps = " && ".join([mount.format(orin.cache), shlex.join([*command, str(orin.bundle)])])
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", steps],
        env=imitated.environment(orin.cache, ORIN_TRT),
        stderr=subprocess.PIPE,
        text=True,
        cwd=imitated.ROOT,
    )
    assert process.returncode == 2, process.stderr
    assert [words in x for x in process.stderr.splitlines() if x.startswith("error:")] == [True]


def test_a_cache_that_fills_up_during_the_build(built: Board) -> None:
    """A file cannot grow beyond a limit, which is what a full disk looks like to a program."""
    before = built.engine.read_bytes()
    limit = len(before) // 2
    process = subprocess.run(
        [sys.executable, "-m", "tests.board.imitated", str(built.root), "87", "build",
         str(built.bundle), "--context", "1024"],
        env=imitated.environment(built.cache, ORIN_TRT),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        stderr=subprocess.PIPE,
        text=True,
        cwd=imitated.ROOT,
    )  # fmt: skip
    assert process.returncode == 2
    (error,) = [x for x in process.stderr.splitlines() if x.startswith("error:")]
    assert "file too large" in error
    assert built.engine.read_bytes() == before
    assert [p.name for p in built.engine.parents[1].iterdir() if ".tmp" in p.name] == []


def test_an_engine_that_gives_other_tokens_is_not_used(
    boards: Boards, bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The variant's weights were moved, and the manifest written anew."""
    path = bundle / "variants" / "jetson-agx-orin" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    named = {tensor.name: tensor for tensor in model.graph.initializer}
    gate, up = (next(n for n in named if part in n) for part in ("gate_proj", "up_proj"))
    named[gate].name, named[up].name = up, gate
    onnx.save(model, path)
    bundles.write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    board = boards(ORIN, ORIN_TRT)
    board.bundle = bundle
    assert board.run("run", "--prompt", "x") == 1
    printed = capfd.readouterr()
    assert "does not give what PyTorch gave" in printed.err
    assert printed.out == ""


def test_a_faster_power_mode_is_named(built: Board, capfd: pytest.CaptureFixture[str]) -> None:
    slow = {
        "/var/lib/nvpmodel/status": "pmode:0001 fmode:quiet\n",
        "/sys/class/devfreq/17000000.ga10b/min_freq": "114750000\n",
    }
    make(built.root, slow)
    capfd.readouterr()
    assert built.run("check") == 0
    table = " ".join(capfd.readouterr().out.split())
    assert re.search(
        r"15 W decodes at most \S+ tokens/s; MAXN would allow \S+, and a prompt", table
    )
    assert "sudo nvpmodel -m 0" in table
    assert "sudo jetson_clocks before measuring" in table


# ----------------------------------------------------------------------- processes, kill -9


def start(board: Board, seconds: float, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A build of so many seconds on the board, in a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.board.imitated", str(board.root), "87", "build",
         str(board.bundle), *arguments],
        env=imitated.environment(board.cache, ORIN_TRT, IMITATED_SECONDS=str(seconds)),
        cwd=imitated.ROOT,
        text=True,
        **options,
    )  # fmt: skip


def test_sigterm_ends_a_build(orin: Board) -> None:
    """As `docker stop` does: at once, and nothing of it is left, the builder's process either."""
    process = start(orin, 60, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("parsing the graph: 1/1"):
            break
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert [p.name for p in (orin.cache / "engines").glob("*/*")] == [".lock"]


def test_two_starts_share_one_engine(orin: Board) -> None:
    both = [start(orin, 3, stderr=subprocess.PIPE) for _ in range(2)]
    logs = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("building the engine" in log for log in logs) == [False, True]
    assert all("parity: 100.0 %" in log for log in logs)


def killed(board: Board, context: int, after: float) -> bool:
    """Start a build on the board, and kill it after so many seconds; whether it came to that."""
    process = start(board, 2, "--context", str(context), stderr=subprocess.DEVNULL)
    try:
        process.wait(after)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def is_whole(board: Board) -> bool:
    """Whether what the cache holds is an engine to be trusted, or nothing that passes for one."""
    names = [path for path in (board.cache / "engines").glob("*/*") if path.name[0] != "."]
    for folder in names:
        record = json.loads((folder / "engine.json").read_text())
        digest = hashlib.sha256((folder / "engine").read_bytes()).hexdigest()
        if record["sha256"] != digest:
            return False
    return len(names) <= 1


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=["two", "ten"]
)
def test_a_killed_build_leaves_nothing_half_written(
    seeds: range, orin: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    """At random moments, each in the build of another engine; then a start succeeds."""
    count = 0
    for seed in seeds:
        count += killed(orin, 1024 + seed, after=random.Random(seed).uniform(0.5, 4))
        assert is_whole(orin)
    assert count
    assert orin.run("build") == 0
    assert "parity: 100.0 %" in capfd.readouterr().err
    left = [path.name for path in orin.engine.parents[1].iterdir()]
    assert sorted(left) == [".lock", "jetson-agx-orin-fp32"]
