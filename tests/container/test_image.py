"""The images, built and run: as far as a Debian can stand in for NVIDIA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgepool import __version__
from edgepool.docker_args import build_args
from edgepool.targets import find_target
from tests.container import images

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "16", "--json")
MOST_BYTES = 250_000_000  # of our own layers
pytestmark = pytest.mark.slow


def on_debian(architecture: str = images.HERE) -> dict[str, str]:
    """The arguments of the image for CPUs, on the Debian that was made here."""
    base = images.base(architecture)
    arguments = build_args(find_target("cpu"))
    return {**arguments, "BASE_IMAGE": base, "RUNTIME_IMAGE": base}


@pytest.fixture(scope="module")
def image() -> str:
    if images.why_not():
        pytest.skip(images.why_not())
    return images.build("Dockerfile", on_debian(), "edgepool-cpu")


@pytest.fixture(scope="module")
def files(image: str) -> Iterator[Path]:
    with images.container(image) as (_, folder):
        yield folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's bundle, and the tokens that PyTorch continues PROMPT with."""
    folder = tmp_path_factory.mktemp("bundle")
    folder.chmod(0o755)
    for arguments in (
        ["init", "edgepool-tiny", "-o", "tiny.pt"],
        ["export", "tiny.pt"],
        ["run", "tiny.pt", *PROMPT],
    ):
        command = [sys.executable, "-m", "edgepool", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command, cwd=folder, check=True, env=environment, capture_output=True
        )
    (folder / "expected.json").write_bytes(result.stdout)
    return folder


def run(image: str, bundle: Path, *command: str) -> str:
    """Output of the image's entrypoint, as the image's user, with the bundle mounted read-only."""
    settings = images.config_of(image)
    with images.container(image) as (name, _):
        mounted = ("--volume", "%s:/models:ro" % bundle)
        options = (*images.CHROOT, *mounted, "--user", settings["User"])
        return images.buildah("run", *options, name, "--", *settings["Entrypoint"], *command)


def test_text_from_the_image(image: str, bundle: Path) -> None:
    """The tokens that PyTorch gives, from ONNX Runtime in the image."""
    printed = run(image, bundle / "edgepool-bundle", "run", "--backend", "ort", *PROMPT)
    expected = json.loads((bundle / "expected.json").read_text())["token_ids"]
    assert len(expected) == 16
    assert json.loads(printed)["token_ids"] == expected


def test_size_of_our_layers(image: str) -> None:
    record = json.loads(images.buildah("images", "--json"))
    sizes = {name: int(each["size_bytes"]) for each in record for name in each.get("names", ())}
    ours = sizes[image + ":latest"] - sizes[images.base()]
    assert 50_000_000 < ours < MOST_BYTES


def test_what_is_not_in_it(files: Path) -> None:
    names = {path.name for path in files.rglob("*") if not path.is_dir()}
    assert "edgepool-entrypoint" in names  # the files are those of the image
    compilers = {"gcc", "g++", "c++", "cc", "cc1", "cc1plus", "clang", "nvcc", "cmake", "ninja"}
    assert not compilers & names
    packages = {path.name.split("-")[0].lower() for path in files.rglob("*.dist-info")}
    assert {"edgepool", "numpy", "onnxruntime", "tokenizers"} <= packages
    assert not {"pip", "setuptools", "torch", "cmake", "hatchling"} & packages
    assert not list(files.glob("root/.cache*"))
    assert not list(files.glob("home/*/.cache*"))
    assert not list(files.glob("var/lib/apt/lists/*Packages*"))
    assert not list(files.glob("run/authorities.pem"))
    assert not (files / "etc/pip.conf").exists() or not (files / "etc/pip.conf").stat().st_size


def test_user_and_groups(image: str, files: Path) -> None:
    user = images.config_of(image)["User"]
    accounts = [line.split(":") for line in (files / "etc/passwd").read_text().splitlines()]
    name = next(account[0] for account in accounts if account[2] == user)
    assert user != "0"
    groups = [line.split(":") for line in (files / "etc/group").read_text().splitlines()]
    assert {"video", "render"} <= {group[0] for group in groups if name in group[3].split(",")}
    cache, delivered = files / "cache", files / "opt/edgepool/bin/edgepool"
    assert str(cache.stat().st_uid) == user
    assert cache.stat().st_mode & 0o077 == 0
    assert delivered.stat().st_uid == 0


def test_settings(image: str) -> None:
    settings = images.config_of(image)
    assert settings["Entrypoint"] == ["edgepool-entrypoint"]
    assert settings["Cmd"] == ["check"]
    assert settings["Healthcheck"]["Test"] == ["CMD", "edgepool", "inspect", "/models"]
    assert set(settings["Volumes"]) == {"/models", "/cache"}
    labels = settings["Labels"]
    assert labels["org.opencontainers.image.title"] == "edgepool"
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == images.base()


def test_the_entrypoint_is_the_checkouts(files: Path) -> None:
    installed = files / "usr/local/bin/edgepool-entrypoint"
    assert installed.read_bytes() == (ROOT / "jetson" / "entrypoint").read_bytes()
    assert installed.stat().st_mode & 0o111 == 0o111


def test_health(image: str, bundle: Path, tmp_path: Path) -> None:
    """Its command succeeds with the bundle, and fails without one."""
    _, *command = images.config_of(image)["Healthcheck"]["Test"]
    with images.container(image) as (name, _):
        for folder, passes in ((bundle / "edgepool-bundle", True), (tmp_path, False)):
            mounted = ("--volume", "%s:/models:ro" % folder)
            words = ("run", *images.CHROOT, *mounted, name, "--", *command)
            if passes:
                images.buildah(*words)
            else:
                with pytest.raises(RuntimeError, match="error: "):
                    images.buildah(*words)


def test_a_base_with_another_python(image: str) -> None:
    """Is refused before anything is installed from the wrong list."""
    arguments = {**on_debian(), "PYTHON": "3.10", "REQUIREMENTS": "jp6"}
    with pytest.raises(RuntimeError, match="the base image has Python 3.11, not 3.10"):
        images.build("Dockerfile.jetson", arguments, "edgepool-refused", "tools")


def test_arm64(bundle: Path) -> None:
    """The board's image on another CPU, emulated, up to text."""
    if images.HERE != "amd64" or images.why_not("arm64"):
        pytest.skip(images.why_not("arm64") or "this machine is no amd64")
    image = images.build(
        "Dockerfile.jetson", on_debian("arm64"), "edgepool-arm64", architecture="arm64"
    )
    with images.container(image) as (name, _):
        assert images.buildah("run", *images.CHROOT, name, "--", "uname", "-m") == "aarch64"
    printed = run(image, bundle / "edgepool-bundle", "run", "--backend", "ort", *PROMPT)
    expected = json.loads((bundle / "expected.json").read_text())["token_ids"]
    assert json.loads(printed)["token_ids"] == expected
