"""`edgepool build-engine` with the real TensorRT-RTX, on a machine with no GPU."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgepool.bundle import Bundle
from edgepool.cli.main import main
from edgepool.engine import build, gpu, store, tensorrt_api, trust
from edgepool.engine.usable import find_usable
from edgepool.errors import BadInput, GateFailed, MissingRequirement

from .machines import full_disk

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="tensorrt-rtx is not installed: pip install 'edgepool[rtx]'"
)
pytestmark = pytest.mark.skipif(gpu.find() is not None, reason="these tests need no GPU here")

SMALL = ["--max-kv-tokens", "256", "--max-input-len", "32"]
NAME = "rtx-fp32"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    assert main(["init", "edgepool-tiny", "-o", str(folder / "tiny.pt"), "--seed", "1"]) == 0
    targets = ["--target", "jetson-agx-orin", "--target", "a100"]
    assert main(["export", str(folder / "tiny.pt"), "-o", str(folder / "b"), *targets]) == 0
    return folder / "b"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of an engine built from `exported`, and where its trust record is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEPOOL_CACHE", str(folder))
        assert main(["build-engine", str(exported), *SMALL]) == 0
    record = store.read(exported / "engines", NAME)
    assert record is not None
    return {**record, "cache": str(folder)}


def test_an_engine_is_built_without_a_gpu(exported: Path, built: dict[str, Any]) -> None:
    engine = exported / "engines" / NAME / "engine"
    assert engine.stat().st_size == built["bytes"] > 1_000_000
    assert built["runtime"].startswith("TensorRT-RTX")
    assert built["form"] == "tensorrt-rtx, portable bodies, no plugins"
    assert built["bytes_copied_per_step"] == built["pool_bytes"] > 0
    Bundle.open(exported).verify()  # an engine is no damage to the bundle


def test_the_same_engine_is_not_built_twice(
    exported: Path, built: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    killed = exported / "engines" / f".{NAME}.{gone.pid}.tmp"
    killed.mkdir()
    started = time.monotonic()
    assert main(["build-engine", str(exported), *SMALL, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["reused"]
    assert time.monotonic() - started < 10
    assert not killed.exists()


def test_only_its_builder_may_load_it(
    exported: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, key = exported / "engines", built["key"]
    with pytest.raises(GateFailed, match="not built by this user"):
        store.load(root, NAME, key)
    assert store.load(root, NAME, key, trusted=True)
    monkeypatch.setenv("EDGEPOOL_CACHE", built["cache"])
    assert len(store.load(root, NAME, key)) == built["bytes"]


@pytest.mark.parametrize("name", list(store.KEYS))
def test_every_difference_has_its_own_words(
    exported: Path, built: dict[str, Any], name: str
) -> None:
    other = {**built["key"], name: "another"}
    with pytest.raises(GateFailed, match=store.KEYS[name].replace("(", r"\(").replace(")", r"\)")):
        store.load(exported / "engines", NAME, other)


def test_a_changed_engine_is_not_loaded(
    exported: Path, built: dict[str, Any], tmp_path: Path
) -> None:
    data = bytearray((exported / "engines" / NAME / "engine").read_bytes())
    data[len(data) // 2] ^= 1
    copy = tmp_path / NAME
    copy.mkdir()
    (copy / "engine").write_bytes(data)
    (copy / "engine.json").write_text((exported / "engines" / NAME / "engine.json").read_text())
    with pytest.raises(GateFailed, match="sha256"):
        store.load(tmp_path, NAME, built["key"], trusted=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "key": {}}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "engine.json").write_text(text)
    with pytest.raises(BadInput, match="damaged"):
        store.read(tmp_path, NAME)


def test_a_record_that_others_can_write_proves_nothing(cache: Path) -> None:
    trust.remember("0" * 64)
    assert trust.built_here() == ["0" * 64]
    assert (cache / trust.RECORD).stat().st_mode & 0o777 == 0o600
    (cache / trust.RECORD).chmod(0o666)
    with pytest.raises(BadInput, match="others can"):
        trust.built_here()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--target", "jetson-agx-orin"], 3, "can only be built on the Jetson AGX Orin"),
        (["--target", "a100"], 3, "can only be built on the NVIDIA A100"),
        (["--target", "jetson-agx-orn"], 2, "did you mean 'jetson-agx-orin"),
        (["--target", "h100", "--runtime", "rtx"], 2, "has no compute capability 9.0"),
        (["--target", "cpu"], 2, "ONNX Runtime runs the bundle"),
        (["--runtime", "tensorrt"], 3, "no GPU here"),
        (["--runtime", "torch"], 2, "choose auto, tensorrt or rtx"),
        (["--int8", "--fp16"], 2, "choose one"),
        (["--max-kv-tokens", "0"], 2, "--max-kv-tokens"),
        (["--max-batch-size", "-1"], 2, "--max-batch-size"),
        (["--max-input-len", "0"], 2, "--max-input-len"),
        (["--workspace", "-1"], 2, "--workspace"),
    ],
)
def test_what_cannot_be_built_here(
    exported: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    before = sorted(p.name for p in (exported / "engines").glob("[!.]*"))
    assert main(["build-engine", str(exported), *arguments]) == code
    assert words in capfd.readouterr().err
    assert sorted(p.name for p in (exported / "engines").glob("[!.]*")) == before


def test_the_command_for_the_board_can_be_pasted(
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a space in the bundle's name, and from the folder itself."""
    bundle = shutil.copytree(exported, tmp_path / "my bundle")
    expected = "run `edgepool build-engine 'my bundle' --target jetson-agx-orin`\n"
    for folder, path in ((tmp_path, "my bundle"), (bundle, ".")):
        monkeypatch.chdir(folder)
        assert main(["build-engine", path, "--target", "jetson-agx-orin"]) == 3
        assert capfd.readouterr().err.endswith(expected)


def test_a_full_disk_leaves_what_was_there(
    exported: Path, built: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with full_disk(1_000_000):
        assert main(["build-engine", str(exported), *SMALL, "--force"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "cannot be written: file too large: free some space, or write elsewhere" in error
    record = store.read(exported / "engines", NAME)
    assert record is not None
    assert record["sha256"] == built["sha256"]
    assert sorted(p.name for p in (exported / "engines").iterdir()) == [".lock", NAME]


@pytest.mark.parametrize("place", [".", "no/such/file"])
def test_a_timing_cache_that_cannot_be_written_is_named_first(
    exported: Path, place: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    option = ["--timing-cache", str(tmp_path / place)]
    assert main(["build-engine", str(exported), *SMALL, "--force", *option]) == 2
    assert "name a file in a folder that exists" in capfd.readouterr().err


HERE = gpu.Gpu("GeForce RTX 4090", 89, 24 << 30, "13.0")


def test_the_engine_is_found_and_checked(
    exported: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(exported)
    with pytest.raises(MissingRequirement, match="no GPU here"):
        find_usable(bundle)
    monkeypatch.setattr(gpu, "find", lambda: HERE)
    with pytest.raises(GateFailed, match="not built by this user"):
        find_usable(bundle)
    assert len(find_usable(bundle, trusted=True).engine) == built["bytes"]
    monkeypatch.setenv("EDGEPOOL_CACHE", built["cache"])
    assert len(find_usable(bundle).engine) == built["bytes"]
    trt = tensorrt_api.find("rtx").trt
    monkeypatch.setattr(trt, "__version__", "9.9.9")
    with pytest.raises(GateFailed, match="built by another TensorRT"):
        find_usable(bundle)


def test_no_engine_yet(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find", lambda: HERE)
    shutil.copytree(exported, tmp_path / "b", ignore=shutil.ignore_patterns("engines"))
    with pytest.raises(BadInput, match="no engine yet"):
        find_usable(Bundle.open(tmp_path / "b"))


def test_run_needs_a_gpu_for_an_engine(exported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(exported), "--backend", "trt", "--prompt", "x"]) == 3
    assert "`--backend ort` runs the bundle" in capfd.readouterr().err


def start(exported: Path, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgepool", "build-engine", str(exported), "--json", *arguments],
        env={**os.environ, "EDGEPOOL_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_build_leaves_nothing(exported: Path, cache: Path) -> None:
    limits = ["--max-kv-tokens", "128", "--max-input-len", "16"]
    root = exported / "engines"
    before = store.read(root, NAME)
    for seed in range(10):
        process = start(exported, cache, *limits, "--force")
        time.sleep(random.Random(seed).uniform(0.2, 12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = store.read(root, NAME)
        if now != before:  # it was done before it was killed
            engine = (root / NAME / store.ENGINE).read_bytes()
            assert now is not None
            assert hashlib.sha256(engine).hexdigest() == now["sha256"]
        before = now
    process = start(exported, cache, *limits)
    process.communicate()
    assert process.returncode == 0
    leftovers = [path.name for path in root.iterdir() if path.name not in (NAME, ".lock")]
    assert leftovers == []


@pytest.mark.slow
def test_two_builds_at_once_share_one_engine(exported: Path, cache: Path) -> None:
    limits = ["--max-kv-tokens", "160", "--max-input-len", "16"]
    processes = [start(exported, cache, *limits) for _ in range(2)]
    records = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(record["reused"] for record in records) == [False, True]
    assert records[0]["sha256"] == records[1]["sha256"]


def test_a_build_that_is_killed_says_so() -> None:
    assert isinstance(build.failure({}, -9), MissingRequirement)
    assert "memory runs out" in str(build.failure({}, 137))
    assert isinstance(build.failure({}, -6), GateFailed)
    answer = {"error": {"code": 2, "message": "words"}}
    assert isinstance(build.failure(answer, 2), BadInput)


def test_a_read_only_bundle_gets_its_engine_in_the_cache(
    exported: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    root = store.root_for(Bundle.open(exported))
    assert cache in root.parents
