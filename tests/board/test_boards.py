"""The entrypoint on imitated boards: Xavier, Orin with JetPack 6 and 7, PCs; and what is wrong."""

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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from edgepool import bundle as bundles
from edgepool.board import engine
from edgepool.board import ready as board_ready
from edgepool.board.fit import Choice, Model
from edgepool.bundle import Bundle
from edgepool.engine import gpu
from edgepool.engine.memory import RESERVE
from edgepool.plugin_library import NAME
from edgepool.runtime import device_memory
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


def the_error(capfd: pytest.CaptureFixture[str]) -> str:
    """What the entrypoint said was wrong: one line, and no traceback."""
    said = capfd.readouterr().err
    assert "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    return error


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


# ------------------------------------------------------------------------------------ engines


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
