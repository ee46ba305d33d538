"""What jetson/ says and configures: README, compose file, systemd unit, jetson-containers."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import compose_spec
import pytest
import typer.main

from edgepool.cli import entrypoint
from edgepool.docker_args import build_args
from edgepool.targets import find_target, load_targets
from tests.container.test_dockerfiles import defaults
from tests.test_docs import code_lines

ROOT = Path(__file__).resolve().parents[2]
JETSON = ROOT / "jetson"
README = (JETSON / "README.md").read_text()
# What shows the power mode in a container (edgepool/engine/condition.py).
POWER = ["/var/lib/nvpmodel", "/etc/nvpmodel.conf"]
# Of a package for jetson-containers (docs/packages.md there).
PACKAGE_KEYS = set(
    "alias build_args build_flags config depends disabled dockerfile docs group name notes path "
    "prefix postfix requires test".split()
)


def commands(program: str) -> list[list[str]]:
    """The command lines of the README that begin with these words, as words."""
    lines = [line for line in code_lines(README) if line.startswith(program)]
    assert lines, program
    return [shlex.split(line, comments=True) for line in lines]


def job_of(words: list[str], image: str) -> list[str]:
    """What the entrypoint is given."""
    return words[words.index(image) + 1 :]


def check_job(words: list[str]) -> None:
    options = {o for p in typer.main.get_command(entrypoint.app).params for o in p.opts}
    assert words[0] in entrypoint.JOBS
    assert {word for word in words if word.startswith("-")} <= options


def test_builds_are_those_of_the_targets() -> None:
    """A board of each JetPack; AGX Orin's image for JetPack 5 is AGX Xavier's."""
    lines = [line for line in code_lines(README) if line.startswith("docker build")]
    assert all("-f Dockerfile.jetson ." in line for line in lines)
    named = re.findall(r"docker-args --target ([\w-]+)\)", "\n".join(lines))
    images = [find_target(name).image for name in named]
    jetsons = [target for target in load_targets().values() if target.kind == "jetson"]
    assert all(target.image in images for target in jetsons)
    assert len(named) == len({target.image for target in jetsons})


def test_the_table_is_that_of_the_targets() -> None:
    rows = re.findall(r"^\| AGX .*`(jetson-[\w-]+)` \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    for name, text in rows:
        image = find_target(name).image
        assert image is not None
        if text != "the same image":
            versions = dict(re.findall(r"(Python|CUDA|TensorRT) ([\d.]+)", text))
            assert versions["Python"] == image.python
            assert versions["CUDA"] == image.cuda
            assert image.tensorrt and image.tensorrt.startswith(versions["TensorRT"])
            assert [int(sm) for sm in re.findall(r"sm_(\d+)", text)] == list(image.sm)


def test_runs_ask_for_what_the_entrypoint_does() -> None:
    for words in commands("docker run"):
        assert words[words.index("--runtime") + 1] == "nvidia"
        check_job(job_of(words, "edgepool"))
    (check,) = [words for words in commands("docker run") if words[-1] == "check"]
    assert all("%s:%s:ro" % (path, path) in check for path in POWER)
    for option in re.findall(
        r"`(--[a-z]+)(?: \w+)?`", README.split("## 3.")[1].split("With Docker")[0]
    ):
        check_job(["run", option])


def test_messages_are_those_of_the_build() -> None:
    scripts = "".join(path.read_text() for path in sorted(JETSON.glob("image/*.sh")))
    scripts = re.sub(r'" \\\n\s*"', " ", scripts)
    headings = re.findall(r"^### `error: (.*)`$", README, re.MULTILINE)
    assert len(headings) == 3
    for heading in headings:
        for piece in heading.split("..."):
            assert piece.strip(" :,") in scripts, heading


def compose_file() -> str:
    """With the variables set, which compose does before it reads anything else."""
    text = (JETSON / "compose.yaml").read_text()
    values = {"EDGEPOOL_BUNDLE": "/some/bundle", "EDGEPOOL_IMAGE": "edgepool"}
    return re.sub(r"\$\{(\w+):[-?][^}]*\}", lambda found: values[found[1]], text)


def test_compose() -> None:
    project = compose_spec.PyCompose.from_yaml(compose_file())
    project.validate()
    service = project.to_dict()["services"]["edgepool"]
    assert service["runtime"] == "nvidia"
    assert service["read_only"] is True
    models, cache, *power = service["volumes"]
    assert (models["source"], models["target"]) == ("/some/bundle", "/models")
    assert models["read_only"] is True
    assert (cache["source"], cache["target"]) == ("cache", "/cache")
    assert [mount["source"] for mount in power] == POWER
    assert all(mount["target"] == mount["source"] and mount["read_only"] for mount in power)
    check_job(service["command"])
    with pytest.raises(ValueError, match="run_time"):
        compose_spec.PyCompose.from_yaml(compose_file().replace("runtime:", "run_time:"))


def test_systemd_unit(tmp_path: Path) -> None:
    text = (JETSON / "edgepool.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    check_job(job_of(command.split(), "edgepool"))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("not installed: systemd-analyze")

    def verify(unit: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "edgepool.service").write_text(unit.replace("/usr/bin/docker", sys.executable))
        (tmp_path / "docker.service").write_text("[Service]\nExecStart=%s\n" % sys.executable)
        words = [analyze, "verify", "--man=no", tmp_path / "edgepool.service"]
        environment = {"SYSTEMD_UNIT_PATH": "%s:" % tmp_path}
        return subprocess.run(words, capture_output=True, text=True, env=environment)

    result = verify(text)
    assert result.returncode == 0
    assert "edgepool.service" not in result.stderr
    wrong = verify(text.replace("Type=oneshot", "Typ=oneshot"))
    assert re.search(r"edgepool\.service:\d+: Unknown key( name)? 'Typ'", wrong.stderr)


@pytest.mark.parametrize(
    ("python", "requirements"), [("3.8", "jp5"), ("3.10", "jp6"), ("3.12", "jp7"), ("3.9", None)]
)
def test_jetson_containers(
    python: str, requirements: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader executes config.py with `package` in it, and reads the result from there."""
    library = types.ModuleType("jetson_containers")
    library.PYTHON_VERSION = python  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jetson_containers", library)
    given = {"path": "x", "requires": ">=32.6", "config": ["config.py"], "test": []}
    path = str(JETSON / "jetson-containers" / "config.py")
    package = runpy.run_path(path, {"package": given})["package"]
    assert set(package) <= PACKAGE_KEYS
    if requirements is None:
        assert package["disabled"]
        return
    assert (Path(package["path"]), package["dockerfile"]) == (ROOT, "Dockerfile.jetson")
    arguments = package["build_args"]
    assert arguments["REQUIREMENTS"] == requirements
    assert set(arguments) <= set(defaults("Dockerfile.jetson"))
    names = ["jetson-agx-xavier", "jetson-agx-orin", "jetson-agx-orin-jp7"]
    (same,) = [
        each
        for each in map(build_args, map(find_target, names))
        if each["REQUIREMENTS"] == requirements
    ]
    assert arguments["ARCHITECTURES"] == same["ARCHITECTURES"]
    assert arguments["PYTHON"] == same["PYTHON"]
