"""Small packages for the tests, well-formed and forged."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from edgepool.package import listing as form
from edgepool.package.listing import BLOCK, LIST, Listing, Member
from edgepool.package.write import measure, write

CONTENTS = {
    "Dockerfile.jetson": b"FROM scratch\n",
    "bundle/empty": b"",
    "bundle/model.onnx": bytes(range(1, 251)) * 600,  # three blocks, the last one not whole
    "bundle/sector": b"s" * 512,
    "bundle/variants/t/model.onnx": b"m" * 513,
    "jetson/entrypoint": b"#!/usr/bin/env python3\n",
}


def write_files(folder: Path, contents: dict[str, bytes]) -> dict[str, Path]:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


def write_package(path: Path, contents: dict[str, bytes] | None = None) -> Listing:
    """A package of files that are first written to a folder beside it."""
    sources = write_files(path.parent / f"{path.name}-sources", contents or CONTENTS)
    listing = Listing("0.1", "jetson-agx-orin", "0" * 64, measure(sources))
    write(path, listing, sources)
    return listing


def member(name: str, content: bytes = b"") -> Member:
    """What a list says of a file, with nothing checked."""
    sums = [zlib.crc32(content[i : i + BLOCK]) for i in range(0, len(content), BLOCK)]
    digest = hashlib.sha256(content).hexdigest()
    return Member(name, len(content), False, digest, "".join("%08x" % crc for crc in sums))


def forge(
    path: Path, members: Iterable[Member], entries: Iterable[tuple[tarfile.TarInfo, bytes]]
) -> Path:
    """A tar by tarfile whose list names `members` and which holds `entries`."""
    text = Listing("0.1", "jetson-agx-orin", "0" * 64, tuple(members)).to_json()
    head = form.header(LIST, len(text), False)
    with path.open("wb") as file:
        file.write(head + text + bytes(-len(text) % 512))
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for info, content in entries:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path
