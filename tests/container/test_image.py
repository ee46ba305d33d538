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
from edgepool.model.presets import PRESETS
from edgepool.targets import find_target
from tests.container import images
from tests.environments import python_3_8
from tests.exporter.models import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "16", "--json")
MOST_MEGABYTES = 250  # of our own layers
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


def edgepool(folder: Path, *arguments: str) -> bytes:
    """Output of a command of this checkout, run in a folder."""
    command = [sys.executable, "-m", "edgepool", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, check=True, env=environment, capture_output=True)
    return done.stdout


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's bundle, and the tokens that PyTorch continues PROMPT with."""
    folder = tmp_path_factory.mktemp("bundle")
    folder.chmod(0o755)
    write_checkpoint(folder / "tiny.pt", PRESETS["edgepool-tiny"])
    edgepool(folder, "export", "tiny.pt", "--target", "jetson-agx-orin")
    (folder / "expected.json").write_bytes(edgepool(folder, "run", "tiny.pt", *PROMPT))
    return folder


@pytest.fixture(scope="module")
def bundle(exported: Path) -> Path:
    return exported / "edgepool-bundle"


@pytest.fixture(scope="module")
def expected(exported: Path) -> list[int]:
    tokens: list[int] = json.loads((exported / "expected.json").read_text())["token_ids"]
    assert len(set(tokens)) > 4
    return tokens


def run(image: str, bundle: Path, *command: str) -> str:
    """Output of the image's entrypoint, as the image's user, with the bundle mounted read-only."""
    settings = images.config_of(image)
    with images.container(image) as (name, _):
        mounted = ("--volume", "%s:/models:ro" % bundle)
        options = (*images.CHROOT, *mounted, "--user", settings["User"])
        return images.buildah("run", *options, name, "--", *settings["Entrypoint"], *command)


def test_text_from_the_image(image: str, bundle: Path, expected: list[int]) -> None:
    """The tokens that PyTorch gives, from ONNX Runtime in the image."""
    printed = run(image, bundle, "run", "--backend", "ort", *PROMPT)
    assert json.loads(printed)["token_ids"] == expected


def test_size_of_our_layers(image: str) -> None:
    ours = images.megabytes(image) - images.megabytes(images.base())
    assert 50 < ours < MOST_MEGABYTES


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
    for mounted in ("run/authorities.pem", "etc/pip.conf"):  # the places may stay, empty
        assert not (files / mounted).exists() or (files / mounted).stat().st_size == 0


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
        for folder, passes in ((bundle, True), (tmp_path, False)):
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


def test_python_3_8(bundle: Path, expected: list[int]) -> None:
    """The packages of JetPack 5's image, on its Python, up to text."""
    interpreter = python_3_8()
    if images.why_not() or interpreter is None:
        pytest.skip(images.why_not() or "this machine has no Python 3.8, the one of JetPack 5")
    show = [interpreter, "-c", "import sys; print(sys.base_prefix)"]
    prefix = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
    base = "localhost/debian-python:3.8"
    with images.container(images.base()) as (name, folder):
        images.buildah("add", "--quiet", name, prefix, "/opt/python3.8")
        (folder / "usr/local/bin/python3").symlink_to("/opt/python3.8/bin/python3")
        (folder / "etc/ld.so.conf.d/python3.8.conf").write_text("/opt/python3.8/lib\n")
        images.buildah("run", *images.CHROOT, name, "--", "ldconfig")
        images.buildah("commit", "--quiet", name, base)
    fitting = {"PYTHON": "3.8", "REQUIREMENTS": "jp5", "BASE_IMAGE": base, "RUNTIME_IMAGE": base}
    image = images.build("Dockerfile.jetson", {**on_debian(), **fitting}, "edgepool-python3.8")
    printed = run(image, bundle, "run", "--backend", "ort", *PROMPT)
    assert json.loads(printed)["token_ids"] == expected


def test_arm64_from_a_package(exported: Path, expected: list[int]) -> None:
    """What a board gets, and nothing else, becomes its image on its kind of CPU, up to text."""
    if images.HERE != "amd64" or images.why_not("arm64"):
        pytest.skip(images.why_not("arm64") or "this machine is no amd64")
    edgepool(exported, "package", "--target", "jetson-agx-orin", "-o", "orin.tar")
    edgepool(exported, "package", "--extract", "orin.tar", "orin")
    context = exported / "orin"
    image = images.build(
        "Dockerfile.jetson",
        on_debian("arm64"),
        "edgepool-arm64",
        architecture="arm64",
        context=context,
    )
    with images.container(image) as (name, _):
        assert images.buildah("run", *images.CHROOT, name, "--", "uname", "-m") == "aarch64"
    printed = run(image, context / "bundle", "run", "--backend", "ort", *PROMPT)
    assert json.loads(printed)["token_ids"] == expected
