"""Where things are: what is delivered beside the code, and what is built by this user.

DATA stands at the top of a checkout, in an installed wheel under `edgepool/_data/`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

from .errors import MissingRequirement

# Delivered beside the package; pyproject.toml puts them in the wheel.
DATA = (".dockerignore", "Dockerfile", "Dockerfile.jetson", "export", "jetson", "plugins")

_PACKAGE = Path(__file__).resolve().parent


def resource(*parts: str) -> Path:
    """Path of a delivered file or folder, such as `resource("export", "targets")`.

    Raises MissingRequirement when this installation does not have it.
    """
    found = (checkout() or _PACKAGE / "_data").joinpath(*parts)
    if not found.exists():
        raise MissingRequirement(
            "%s is not in this installation of edgepool: install the whole wheel or use a checkout"
            % found
        )
    return found


def checkout() -> Optional[Path]:
    """The checkout that this package is part of; None where it is installed."""
    return None if (_PACKAGE / "_data").is_dir() else _PACKAGE.parent


def cache_folder() -> Path:
    """Where this user's plugin libraries, engines and their record are: EDGEPOOL_CACHE, or in the
    user's cache."""
    chosen = os.environ.get("EDGEPOOL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(chosen) if chosen else Path(base) / "edgepool"
