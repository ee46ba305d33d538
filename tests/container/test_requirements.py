"""The pinned packages of the images exist for the boards: the package index is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What wheels for arm64 are tagged with. JetPack 5 has glibc 2.31.
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)] + ["manylinux2014_aarch64"]
pytestmark = pytest.mark.slow


def download(folder: Path, requirements: Path, *options: str) -> set[str]:
    """The files that pip takes, for another Python and CPU; it checks Requires-Python as well."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
    result = subprocess.run(
        [*command, *options, "-r", requirements], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("release", "python"),
    [
        ("jp5", "3.8"),
        ("jp6", "3.10"),
        ("jp7", "3.11"),
        ("jp7", "3.12"),
        ("cuda", "3.8"),
        ("cuda", "3.12"),
        ("build", "3.8"),
        ("build", "3.10"),
        ("build", "3.12"),
    ],
)
def test_wheels_for_the_board(release: str, python: str, tmp_path: Path) -> None:
    lines = (ROOT / "jetson" / f"requirements-{release}.txt").read_text().splitlines()
    pins = [line for line in lines if "==" in line and not line.startswith("pycuda==")]
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    options = ["--only-binary", ":all:", "--python-version", python]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    found = download(tmp_path / "wheels", tmp_path / "pins.txt", *options)
    assert len(found) == len(pins)
    if release == "jp5":
        assert any(name.startswith("onnxruntime-1.19.2-cp38-") for name in found)


def test_the_check_sees_what_a_python_lacks(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("onnxruntime==1.20.0\n")
    options = ["--only-binary", ":all:", "--python-version", "3.8"]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with pytest.raises(AssertionError, match="onnxruntime==1.20.0"):
        download(tmp_path / "wheels", tmp_path / "pins.txt", *options)


def test_the_source_of_pycuda(tmp_path: Path) -> None:
    """It has no wheels, and its source is for Python 3.8 too."""
    lines = (ROOT / "jetson" / "requirements-cuda.txt").read_text().splitlines()
    (pin,) = [line for line in lines if line.startswith("pycuda==")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", tmp_path]
    # Its build backend asks for numpy, which it needs only where it is compiled.
    subprocess.run([*command, "--no-binary", "pycuda", "--no-build-isolation", pin], check=True)
    (source,) = tmp_path.iterdir()
    assert source.name == pin.replace("==", "-") + ".tar.gz"
    subprocess.run(["tar", "-xf", source, "-C", tmp_path], check=True)
    files = [path for path in tmp_path.glob("*/pycuda/*.py") if path.name != "compyte"]
    vermin = [Path(sys.executable).with_name("vermin"), "-t=3.8-", "--no-tips", "--violations"]
    result = subprocess.run([*vermin, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
