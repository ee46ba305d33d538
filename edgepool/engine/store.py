"""Engines on disk: one folder each, complete or not there.

    ROOT/NAME/engine         what TensorRT serialised
    ROOT/NAME/engine.json    the record: what it was built from, its sha256
    ROOT/.lock               held while one is built

ROOT is the bundle's `engines`, or a folder of the user's cache where the bundle cannot be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from .. import files
from ..bundle import ENGINES, Bundle
from ..errors import BadInput, GateFailed
from ..resources import cache_folder
from . import trust

ENGINE, RECORD = "engine", "engine.json"
LARGEST_RECORD = 1 << 20
VERSION = 1
# key of a record: what changed, where it is not what is asked for
KEYS = {
    "graph": "the graph changed",
    "weights": "the weights changed",
    "precision": "another precision was asked for",
    "profiles": "other limits were asked for (batch, input length or KV tokens)",
    "workspace": "another workspace was asked for",
    "compute_capabilities": "it was built for other GPUs",
    "runtime": "it was built by another TensorRT",
    "plugins": "it was built with another plugin library",
    "gpu": "it was built on another GPU",
}


def root_for(bundle: Bundle) -> Path:
    """The folder for a bundle's engines."""
    if os.access(str(bundle.path), os.W_OK):
        return bundle.path / ENGINES
    return cached_root(bundle)


def cached_root(bundle: Bundle) -> Path:
    """The folder for them in the user's cache."""
    return cache_folder() / ENGINES / str(bundle.manifest["digest"])[:16]


@contextlib.contextmanager
def locked(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder of engines; `waiting()` is called once if another holds it."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def read(root: Path, name: str) -> Optional[Dict[str, Any]]:
    """The record of an engine, or None where there is none; raises BadInput for a damaged one."""
    path = root / name / RECORD
    if not path.exists():
        return None
    try:
        if path.stat().st_size > LARGEST_RECORD:
            raise ValueError
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION or not isinstance(record["key"], dict):
            raise ValueError
        digest, size = str(record["sha256"]), int(record["bytes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput("%s: damaged: build the engine again with --force" % path) from error
    engine = root / name / ENGINE
    if not engine.is_file() or engine.stat().st_size != size or len(digest) != 64:
        raise BadInput("%s: damaged: build the engine again with --force" % engine)
    return dict(record)


def difference(record: Dict[str, Any], key: Dict[str, Any]) -> Optional[str]:
    """Why an engine is not the one that `key` describes; None if it is."""
    for name, reason in KEYS.items():
        if record["key"].get(name) != key[name]:
            return reason
    return None


def load(root: Path, name: str, key: Dict[str, Any], trusted: bool = False) -> bytes:
    """The bytes of an engine that may be deserialised.

    Raises BadInput where there is none, GateFailed for one that is not what `key` describes, was
    changed since it was built, or was not built by this user (unless `trusted`).
    """
    path = root / name / ENGINE
    record = read(root, name)
    if record is None:
        raise BadInput("%s: no engine: `edgepool build-engine` makes one" % path)
    reason = difference(record, key)
    if reason:
        raise GateFailed("%s: %s: run `edgepool build-engine` again" % (path, reason))
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != record["sha256"]:
        raise GateFailed("%s: its sha256 is not the recorded one: build it again" % path)
    if not trusted and digest not in trust.built_here():
        raise GateFailed(
            "%s: not built by this user, and an engine is code: build it here, or say "
            "--trust-engine if you know where it comes from" % path
        )
    return data


@contextlib.contextmanager
def staged(root: Path, name: str, key: Dict[str, Any]) -> Iterator["Staged"]:
    """A folder to build into; when the block ends without an error it is the engine NAME."""
    with files.new_folder(root / name) as temporary:
        work = Staged(temporary)
        yield work
        engine = temporary / ENGINE
        digest = files.sha256(engine)
        record = {
            "version": VERSION,
            "key": key,
            "sha256": digest,
            "bytes": engine.stat().st_size,
            **work.facts,
        }
        work.record = record
        text = json.dumps(record, indent=2, sort_keys=True) + "\n"
        (temporary / RECORD).write_text(text, encoding="utf-8")
    trust.remember(digest)


class Staged:
    """The folder of an engine that is being built, and what its record says of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.engine = folder / ENGINE
        self.facts: Dict[str, Any] = {}  # for the record; to be filled in
        self.record: Dict[str, Any] = {}  # when the block has ended
