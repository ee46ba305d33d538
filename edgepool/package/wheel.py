"""The wheel of this edgepool, made without a network: from a checkout, or from an installed one.

pip would build it in an environment that it fetches first. Here the files that are running become
the wheel, and the metadata are those of the installation (an editable one for a checkout).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import sys
import zipfile
from pathlib import Path
from typing import Iterator, List, Tuple

from .. import __version__, resources
from ..errors import MissingRequirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "edgepool-%s-py3-none-any.whl" % __version__
INFO = "edgepool-%s.dist-info/" % __version__
METADATA = (INFO + "METADATA", INFO + "WHEEL", INFO + "entry_points.txt")
NOT_OURS = {"__pycache__", "build", "dist"}  # folders of a checkout, as .gitignore has them
EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path) -> Path:
    """Write the wheel into a folder: the same bytes from a checkout and from an installed wheel.

    Raises MissingRequirement where edgepool is not installed, or was in another state.
    """
    contents = dict(_files())
    lines = ["%s,sha256=%s,%d" % (n, _digest(c), len(c)) for n, c in sorted(contents.items())]
    record = "\n".join([*lines, INFO + "RECORD,,"]) + "\n"
    path = folder / NAME
    # not compressed: what zlib makes of the same bytes depends on its version
    with zipfile.ZipFile(str(path), "w", zipfile.ZIP_STORED) as archive:
        for name, content in [*sorted(contents.items()), (INFO + "RECORD", record.encode("utf-8"))]:
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content)
    return path


def _files() -> Iterator[Tuple[str, bytes]]:
    """Name in the wheel and content of every file but RECORD."""
    try:
        installed = importlib.metadata.distribution("edgepool")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingRequirement(
            "edgepool is not installed, and its wheel needs the metadata: pip install -e ."
        ) from error
    if installed.version != __version__:
        raise MissingRequirement(
            "edgepool %s runs, but %s is installed: pip install it again"
            % (__version__, installed.version)
        )
    checkout = resources.checkout()
    if checkout is not None:
        _check_requirements(checkout, installed)
    for file in installed.files or ():
        name = file.as_posix()
        ours = name.startswith("edgepool/") and checkout is None and not name.endswith(".pyc")
        if ours or name in METADATA or name.startswith(INFO + "licenses/"):
            yield name, Path(str(file.locate())).read_bytes()
    if checkout is not None:
        for top, prefix in (("edgepool", ""), *((d, "edgepool/_data/") for d in resources.DATA)):
            found = checkout / top
            for path in sorted(found.rglob("*")) if found.is_dir() else [found]:
                name = path.relative_to(checkout).as_posix()
                if path.is_file() and not NOT_OURS & set(name.split("/")):
                    yield prefix + name, path.read_bytes()


def _check_requirements(checkout: Path, installed: importlib.metadata.Distribution) -> None:
    """Raise MissingRequirement where the checkout asks for other packages than its metadata say."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = [text for text in installed.requires or () if "extra ==" not in text]
    if sorted(map(_words, said)) != sorted(map(_words, project["dependencies"])):
        raise MissingRequirement(
            "pyproject.toml has other dependencies than when edgepool was installed: "
            "pip install -e . again"
        )


def _words(requirement: str) -> List[str]:
    """A requirement's names, operators and versions: tools write them in different orders."""
    return sorted(re.findall(r"[\w.-]+|[<>=!~]+", requirement))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")
