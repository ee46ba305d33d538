"""Adding files to a bundle: the whole bundle is replaced at once, unchanged files are linked."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import bundle as bundles
from ..bundle import Bundle


@contextlib.contextmanager
def amended(bundle: Bundle, without: tuple[str, ...] = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder with all that the bundle holds, and its manifest to change.

    It takes the bundle's place when the block ends without an error; until then the bundle is
    untouched. Its files are hard links where the disk has them, so the block writes under new names
    or removes first; `without` are names that are left out.
    """
    with bundles.staged(bundle.path) as folder:
        for source in sorted(bundle.path.rglob("*")):
            name = source.relative_to(bundle.path)
            if source.is_dir():
                (folder / name).mkdir(parents=True, exist_ok=True)
            elif name.as_posix() not in (*without, bundles.MANIFEST):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _link(source, folder / name)
        manifest = dict(bundle.manifest)
        yield folder, manifest
        bundles.write_manifest(folder, manifest)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
