"""Finds the folders that are delivered beside the code: `export/`, `jetson/`, `plugins/`.

In a checkout they stand at its top, in an installed wheel under `edgepool/_data/`.
"""

from __future__ import annotations

from pathlib import Path

from .errors import MissingRequirement

_PACKAGE = Path(__file__).resolve().parent


def resource(*parts: str) -> Path:
    """Path of a delivered file or folder, such as `resource("export", "targets")`.

    Raises MissingRequirement when this installation does not have it.
    """
    installed = _PACKAGE / "_data"
    found = (installed if installed.is_dir() else _PACKAGE.parent).joinpath(*parts)
    if not found.exists():
        raise MissingRequirement(
            "%s is not in this installation of edgepool: install the whole wheel or use a checkout"
            % found
        )
    return found
