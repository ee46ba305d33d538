"""Virtual environments with other packages than the tests' own, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.assets import cache_folder


def python_with(*requirements: str, interpreter: str = sys.executable) -> Path:
    """The Python of an environment that holds `requirements`, made on first use."""
    version = subprocess.run(
        [interpreter, "-VV"], capture_output=True, text=True, check=True
    ).stdout
    key = hashlib.sha256("\n".join([version, *requirements]).encode()).hexdigest()[:16]
    folder = cache_folder() / "environments" / key
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return python


def python_3_8() -> str | None:
    """A Python 3.8, the one of JetPack 5, if this machine has it."""
    found = shutil.which("python3.8")
    if found is None:
        return None
    show = [found, "-c", "import sys; print(sys.executable)"]
    # pyenv's shims run a version only when it is asked for.
    environment = {**os.environ, "PYENV_VERSION": "3.8"}
    result = subprocess.run(show, capture_output=True, text=True, env=environment)
    return result.stdout.strip() if result.returncode == 0 else None
