"""The package as people install it: the wheel alone, no extras, away from the checkout."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edgepool.resources import DATA
from tests.environments import python_3_8

ROOT = Path(__file__).resolve().parents[1]

PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "16", "--json")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    subprocess.run(build, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, its bundle, and the tokens that PyTorch continues PROMPT with."""
    folder = tmp_path_factory.mktemp("bundle")
    checkout = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in (
        ["init", "edgepool-tiny", "-o", "tiny.pt"],
        ["export", "tiny.pt"],
        ["package", "--target", "jetson-agx-xavier", "-o", "xavier.tar"],
        ["run", "tiny.pt", *PROMPT],
    ):
        command = [sys.executable, "-m", "edgepool", *arguments]
        result = subprocess.run(command, cwd=folder, check=True, env=checkout, capture_output=True)
    (folder / "expected.json").write_bytes(result.stdout)
    return folder


@pytest.fixture(scope="module", params=["this python", "python 3.8"])
def edgepool(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed command, as a function of its arguments, run in an empty folder."""
    python = sys.executable if request.param == "this python" else python_3_8()
    if python is None:
        pytest.skip("this machine has no Python 3.8, the one of JetPack 5")
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)  # 3.8's own cannot read new wheels
    subprocess.run([*pip, wheel], check=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "venv" / "bin" / "edgepool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder)

    return run


def test_wheel_holds_what_the_checkout_holds(wheel: Path) -> None:
    list_files = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        [*list_files, "edgepool", *DATA], capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {f if f.startswith("edgepool/") else "edgepool/_data/" + f for f in listed}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_a_package_holds_the_wheel_that_pip_makes(wheel: Path, bundle: Path) -> None:
    """But for the generator's name, and the order and compression of the files."""
    with tarfile.open(bundle / "xavier.tar") as package:
        stream = package.extractfile(f"wheel/{wheel.name}")
        assert stream is not None
        delivered = io.BytesIO(stream.read())
    contents = []
    for source in (wheel, delivered):
        with zipfile.ZipFile(source) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        contents.append({n: c for n, c in held.items() if Path(n).name not in ("RECORD", "WHEEL")})
    metadata = next(name for name in contents[0] if name.endswith("/METADATA"))
    texts = [held.pop(metadata).decode().split("\n\n")[0].splitlines() for held in contents]
    needs = [sorted(x for x in t if "extra ==" not in x and x[:8] == "Requires") for t in texts]
    assert needs[0] == needs[1]  # extras may have changed since this checkout was installed
    assert contents[0] == contents[1]


def test_a_package_on_the_board(edgepool: Callable, bundle: Path, tmp_path: Path) -> None:
    """Verified, unpacked and run by an installation without extras, on JetPack 5's Python too."""
    package, place = str(bundle / "xavier.tar"), tmp_path / "a board"
    assert edgepool("package", "--verify", package).stdout == "intact\n"
    result = edgepool("package", "--extract", package, str(place))
    assert result.returncode == 0, result.stderr
    result = edgepool("run", str(place / "bundle"), *PROMPT)
    assert result.returncode == 0, result.stderr
    expected = json.loads((bundle / "expected.json").read_text())
    assert json.loads(result.stdout)["token_ids"] == expected["token_ids"]


def test_installed_command_finds_its_data(edgepool: Callable) -> None:
    targets = json.loads(edgepool("targets", "--json").stdout)
    assert "jetson-agx-xavier" in json.dumps(targets)


def test_missing_extra_is_named(edgepool: Callable) -> None:
    result = edgepool("init", "edgepool-tiny", "-o", "model.pt")
    assert result.returncode == 3
    assert "pip install 'edgepool[export]'" in result.stderr


def test_a_bundle_runs_without_extras(edgepool: Callable, bundle: Path) -> None:
    """What a checkout exports, an installation without torch runs, to the same tokens."""
    result = edgepool("run", str(bundle / "edgepool-bundle"), *PROMPT)
    assert result.returncode == 0, result.stderr
    expected = json.loads((bundle / "expected.json").read_text())
    assert len(expected["token_ids"]) == 16
    assert json.loads(result.stdout)["token_ids"] == expected["token_ids"]
