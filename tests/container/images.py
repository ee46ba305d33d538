"""Container images without a container engine and without a registry.

buildah builds the Dockerfiles, with a Debian made by debootstrap in place of NVIDIA's images; both
are kept in the user's cache folder. It takes root, and `apt-get install buildah debootstrap`; for
another CPU also qemu-user-static, which the kernel has to know (binfmt_misc).
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.assets import cache_folder

ROOT = Path(__file__).resolve().parents[2]
HERE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
RELEASE = "bookworm"
CHROOT = ("--isolation", "chroot")  # needs no namespaces, which a container may not make


def why_not(architecture: str = HERE) -> str:
    """What this machine lacks, or nothing."""
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing:
        return "not installed: " + ", ".join(missing)
    emulator = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
    if architecture != HERE and not emulator.exists():
        return (
            "the kernel has no emulator for arm64: apt-get install qemu-user-static, "
            "then systemctl restart systemd-binfmt"
        )
    return ""


@lru_cache(maxsize=None)
def store() -> tuple[str, ...]:
    """Options of buildah for a store of our own: in layers where the file system can, or copies."""
    folder = cache_folder() / "containers"
    for driver in ("overlay", "vfs"):
        options = ("--root", str(folder / driver), "--runroot", str(folder / driver / "run"))
        options += ("--storage-driver", driver)
        if subprocess.run(["buildah", *options, "images"], capture_output=True).returncode == 0:
            return options
    raise RuntimeError("buildah can store no images in %s" % folder)


def buildah(*arguments: object) -> str:
    """What the command prints; RuntimeError, with the end of its log, if it fails."""
    command = ["buildah", *store(), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError("%s\n%s" % (" ".join(command), (result.stdout + result.stderr)[-4000:]))
    return result.stdout.strip()


@contextlib.contextmanager
def container(image: str) -> Iterator[tuple[str, Path]]:
    """A container of an image, to run commands in, and the folder where its files are."""
    name = buildah("from", "--pull-never", image)
    try:
        yield name, Path(buildah("mount", name))
    finally:
        buildah("rm", name)


def base(architecture: str = HERE) -> str:
    """A Debian as small as it gets, in place of NVIDIA's images; made on first use."""
    image = "localhost/debian-%s:%s" % (architecture, RELEASE)
    if image in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return image
    with tempfile.TemporaryDirectory() as folder:
        options = ["--variant=minbase", "--arch=" + architecture]
        debootstrap = ["debootstrap", *options, RELEASE, folder, _mirror()]
        subprocess.run(debootstrap, check=True, stdout=subprocess.DEVNULL)
        for path in Path(folder, "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        name = buildah("from", "scratch")
        buildah("add", "--quiet", name, folder, "/")
        buildah("config", "--arch", architecture, name)
        buildah("commit", "--quiet", "--rm", name, image)
    return image


def build(
    dockerfile: str,
    arguments: Mapping[str, str],
    name: str,
    stage: str = "runtime",
    architecture: str = HERE,
    context: Path = ROOT,
) -> str:
    """Build a stage, and those it stands on; the result's name."""
    image = "localhost/%s" % name
    with tempfile.TemporaryDirectory() as folder:
        buildah(
            *("bud", *CHROOT, "--format", "docker", "--layers", "--arch", architecture),
            *(word for pair in arguments.items() for word in ("--build-arg", "%s=%s" % pair)),
            *_package_index(Path(folder)),
            *("--target", stage, "--tag", image, "--file", context / dockerfile, context),
        )
    return image


def megabytes(image: str) -> float:
    """Of all layers of an image, those of its base included."""
    name = image if ":" in image else image + ":latest"
    for record in json.loads(buildah("images", "--json")):
        if name in (record["names"] or ()):
            number, unit = record["size"].split()
            return float(number) * {"MB": 1, "GB": 1000}[unit]
    raise RuntimeError("no image " + name)


def config_of(image: str) -> dict[str, Any]:
    """User, Env, Entrypoint, Cmd, Healthcheck, Labels, Volumes of an image."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))
    settings: dict[str, Any] = found["Docker"]["config"]
    return settings


def _mirror() -> str:
    """The Debian mirror that apt uses here."""
    listed = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    return next(uri for uri in found if re.search(r"/debian/*$", uri))


def _package_index(folder: Path) -> list[str]:
    """Mounts for the time of the build: this machine's own way to the package index."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    found = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    names = "cert|index-url|proxy|timeout|trusted-host"
    settings = dict(re.findall(r"^[\w:]+\.(%s)='(.*)'$" % names, found, re.MULTILINE))
    authorities = settings.get("cert") or ssl.get_default_verify_paths().cafile
    mounts = []
    if authorities:
        settings["cert"] = "/run/authorities.pem"
        mounts += ["--volume", "%s:/run/authorities.pem:ro" % Path(authorities).resolve()]
    lines = ["[global]", *("%s = %s" % item for item in settings.items())]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return [*mounts, "--volume", "%s:/etc/pip.conf:ro" % (folder / "pip.conf")]
