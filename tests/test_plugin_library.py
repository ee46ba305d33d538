"""The build record of a plugin library: read from any bytes, without loading the library."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepool import __version__, plugin_library
from edgepool.cli.main import main
from edgepool.errors import BadInput
from edgepool.plugin_library import NAME, build_record, installed

ROOT = Path(__file__).resolve().parents[1]
RECORD = {
    "format": "edgepool-plugins",
    "record": 1,
    "version": __version__,
    "commit": "0123456789ab",
    "cuda": "12.6",
    "tensorrt": "10.3.0.30",
    "interface": "IPluginV3",
    "sm": [87],
    "ptx": [],
    "emulated": False,
    "operators": ["index_pool"],
}
Library = Callable[..., Path]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A shared library with RECORD, some keys changed, as the plugins' build writes it."""
    compiler = shutil.which("g++") or pytest.skip("no C++ compiler")
    template = (ROOT / "plugins" / "cmake" / "record.cpp.in").read_text()

    def make(code: str = "", **changed: object) -> Path:
        folder = tmp_path_factory.mktemp("library")
        text = json.dumps({**RECORD, **changed})
        source = folder / "record.cpp"
        source.write_text(template.replace("@EDGEPOOL_BUILD_RECORD@", text) + code)
        command = [compiler, "-shared", "-fPIC", source, "-o", folder / NAME]
        subprocess.run(command, check=True)
        return folder / NAME

    return make


@pytest.fixture(scope="module")
def plain(library: Library) -> Path:
    return library()


def test_the_record_is_what_was_written(library: Library) -> None:
    expected = {k: v for k, v in RECORD.items() if k not in ("format", "record")}
    assert build_record(library()) == {**expected, "machine": platform.machine()}


def test_a_stripped_library_keeps_it(library: Library) -> None:
    path = library()
    subprocess.run(["strip", path], check=True)
    assert build_record(path)["commit"] == RECORD["commit"]


def test_reading_executes_nothing(library: Library, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = '\n#include <cstdio>\nstatic FILE* f = std::fopen("%s", "w");\n' % trace
    path = library(code)
    build_record(path)
    assert not trace.exists()
    subprocess.run(["python3", "-c", "import ctypes; ctypes.CDLL(%r)" % str(path)], check=True)
    assert trace.exists()  # it would have


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its record is unknown"),
        ({"record": 2}, "upgrade it"),
        ({"sm": 87}, "no usable 'sm'"),
        ({"emulated": 0}, "no usable 'emulated'"),
        ({"operators": ["x" * 70000]}, "its record is too long"),
    ],
)
def test_unusable_records_are_refused(library: Library, change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build_record(library(**change))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is no ELF file"),
        (b"PK\x03\x04" + bytes(100), "it is no ELF file"),
        (b"\x7fELF\x01\x01" + bytes(100), "no 64-bit little-endian"),
        (b"\x7fELF\x02\x01" + bytes(100), "no table of sections"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as refused:
        build_record(path)
    assert str(path) in str(refused.value)


def test_every_truncation_is_refused(plain: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / NAME, plain.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 300)):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput):
            build_record(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(
    plain: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """No other exception, whatever the headers say."""
    damaged = bytearray(plain.read_bytes())
    (table,) = struct.unpack_from("<Q", damaged, 40)
    places = st.one_of(st.integers(0, 63), st.integers(table, len(damaged) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    path = tmp_path / NAME
    path.write_bytes(damaged)
    try:
        record = build_record(path)
    except BadInput:
        return
    assert record["version"] == __version__


# ---------------------------------------------------------------------------------- installed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEPOOL_CACHE", str(tmp_path))
    return tmp_path / "plugins"


def place(built: Path, sm: int) -> Path:
    folder = plugin_library.default_folder(sm)
    folder.mkdir(parents=True, mode=0o755)
    return Path(shutil.copy(built, folder / NAME))


def test_the_library_built_last_is_found(library: Library, cache: Path) -> None:
    assert installed() is None
    older, newer = place(library(), 80), place(library(), 87)
    os.utime(older, (1, 1))
    assert installed() == newer
    os.utime(newer, (0, 0))
    assert installed() == older


@pytest.mark.parametrize("change", [{"version": "0.0.1"}, {"emulated": True}])
def test_libraries_that_do_not_fit_are_passed_over(
    library: Library, cache: Path, change: dict
) -> None:
    place(library(**change), 87)
    assert installed() is None


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_can_write_is_passed_over(
    library: Library, cache: Path, mode: int
) -> None:
    path = place(library(), 87)
    path.chmod(mode)
    assert installed() is None
    path.chmod(0o755)
    assert installed() == path
    path.parent.chmod(mode)
    assert installed() is None


# ------------------------------------------------------------------------------------ command


def test_inspect_shows_it(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    path = library()
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for text in ("sm_87", "12.6", "10.3.0.30, IPluginV3", "0123456789ab", "index_pool"):
        assert text in shown
    assert main(["inspect", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "plugin library"
    assert record["bytes"] == path.stat().st_size
    assert record["sm"] == [87]


def test_inspect_refuses_another_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "libother.so"
    path.write_bytes(b"\x7fELF")
    assert main(["inspect", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: %s: not a library of edgepool's plugins" % path)
    assert printed.out == ""
