"""Dockerfile, Dockerfile.jetson and what they copy, without building anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgepool import __version__
from edgepool.cli.main import main
from edgepool.docker_args import build_args, dockerfile
from edgepool.targets import find_target, load_targets

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile", "Dockerfile.jetson")
WITH_IMAGE = [name for name, target in load_targets().items() if target.image is not None]


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", (ROOT / name).read_text())
    return [" ".join(line.split()) for line in text.splitlines() if line and line[0] != "#"]


def defaults(name: str) -> dict[str, str]:
    found = (re.match(r"ARG (\w+)=(.*)", line) for line in instructions(name))
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("name", FILES)
def test_hadolint(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, ROOT / name], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_hadolint_sees_faults(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install x\n")
    command = [Path(sys.executable).with_name("hadolint"), tmp_path / "Dockerfile"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "DL3006" in result.stdout  # an image without a version


def test_both_have_the_same_stages() -> None:
    datacenter, jetson = (
        [re.sub(r"^(ARG \w+)=.*", r"\1", line) for line in instructions(name)] for name in FILES
    )
    assert datacenter == jetson
    stages = [line.split()[-1] for line in jetson if line.startswith("FROM ")]
    assert stages == ["tools", "packages", "plugins", "runtime"]


@pytest.mark.parametrize("name", WITH_IMAGE)
def test_arguments_exist_and_are_for_existing_files(name: str) -> None:
    target = find_target(name)
    arguments = build_args(target)
    assert set(arguments) <= set(defaults(dockerfile(target)))
    assert (ROOT / "jetson" / ("requirements-%s.txt" % arguments["REQUIREMENTS"])).is_file()
    # They stand on a command line as they are printed, unquoted.
    assert all(re.fullmatch(r"[\w./:,-]+", value) for value in arguments.values())


def test_defaults_are_those_of_a_target() -> None:
    """JetPack 6's for the Jetson, where the runtime image follows BASE_IMAGE when that is given."""
    assert {**build_args(find_target("jetson-agx-orin")), "PLUGINS": "build"} == {
        **defaults("Dockerfile.jetson"),
        "RUNTIME_IMAGE": build_args(find_target("jetson-agx-orin"))["RUNTIME_IMAGE"],
    }
    datacenter = defaults("Dockerfile")
    assert datacenter["VERSION"] == __version__
    architectures = datacenter.pop("ARCHITECTURES").split(",")
    for name in ("a100", "l4", "h100", "b200"):
        arguments = build_args(find_target(name))
        assert arguments.pop("ARCHITECTURES") + "-real" in architectures
        assert {**arguments, "PLUGINS": "build", "RUNTIME_IMAGE": "${BASE_IMAGE}"} == datacenter


def test_requirements_are_pinned() -> None:
    paths = sorted(ROOT.glob("jetson/requirements-*.txt"))
    assert len(paths) == 5
    for path in paths:
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        names = [line.split("==")[0].lower() for line in lines if line]
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line), path.name
        assert names == sorted(names)
        assert "torch" not in names


def test_requirements_are_what_edgepool_asks_for() -> None:
    """Every dependency of pyproject.toml, in a version that it allows."""
    from packaging.requirements import Requirement

    from edgepool.targets import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for release, python in (("jp5", "3.8"), ("jp6", "3.10"), ("jp7", "3.12"), ("jp7", "3.11")):
        text = (ROOT / "jetson" / ("requirements-%s.txt" % release)).read_text()
        pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text.lower(), re.MULTILINE))
        for requirement in map(Requirement, project["dependencies"]):
            if requirement.marker is None or requirement.marker.evaluate(
                {"python_version": python}
            ):
                assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_what_is_copied_is_in_the_context() -> None:
    """.dockerignore lists what may be in it; the sources of the copies are there."""
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    pattern = r'^"([\w./-]+)" = "edgepool/_data/'
    shipped = re.findall(pattern, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*shipped, "edgepool", "pyproject.toml", "README.md", "LICENSE"} <= allowed
    for line in instructions("Dockerfile.jetson"):
        if line.startswith("COPY ") and "--from" not in line:
            sources = [source for source in line.split()[1:-1] if source != "."]
            assert {source.split("/")[0] for source in sources} <= allowed, line
            assert all(list(ROOT.glob(source)) for source in sources), line


@pytest.mark.parametrize("path", sorted(ROOT.glob("jetson/image/*.sh")), ids=lambda path: path.name)
def test_scripts_are_shell(path: Path) -> None:
    assert path.read_text().startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n", path]).returncode == 0
    used = {line.split()[2] for line in instructions("Dockerfile.jetson") if line[:4] == "RUN "}
    assert path.name in {Path(script).name for script in used}


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docker-args", "--target", "jetson-agx-xavier"]) == 0
    words = capsys.readouterr().out.split()
    assert words[::2] == ["--build-arg"] * (len(words) // 2)
    printed = dict(word.split("=", 1) for word in words[1::2])
    assert printed["BASE_IMAGE"] == "nvcr.io/nvidia/l4t-jetpack:r35.4.1"
    assert printed["ARCHITECTURES"] == "72-real,87-real"  # AGX Orin too
    assert main(["docker-args", "--target", "jetson-agx-xavier", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["dockerfile"] == "Dockerfile.jetson"
    assert record["build_args"] == printed
    assert main(["docker-args", "--target", "rtx-4090"]) == 2
    assert "no container" in capsys.readouterr().err
    assert main(["docker-args", "--target", "jetpack-4"]) == 2
    assert "unknown target" in capsys.readouterr().err
