"""The library of TensorRT plugins: where it is, and what it says about itself.

`edgepool build-plugins` makes it. It carries a record of how it was built in a section of the ELF
file, which is read here without loading the library, so that nothing of it is executed.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple

from . import __version__
from .errors import BadInput
from .resources import cache_folder, resource

NAME = "libedgepool_plugins.so"
SECTION = b".edgepool_record"  # plugins/cmake/record.cpp.in
FORMAT, VERSION = "edgepool-plugins", 1

# Far above what a library has, so that a wrong file is refused before much of it is read.
MOST_SECTIONS, LONGEST_NAMES, LONGEST_RECORD = 4096, 1 << 20, 1 << 16
MACHINES = {62: "x86_64", 183: "aarch64"}

# key: type of its value, in the record
RECORD_KEYS: Dict[str, type] = {
    "version": str,  # of edgepool
    "commit": str,  # of the sources, with `-dirty` where they were changed; empty if not known
    "cuda": str,  # of the toolkit; empty if emulated
    "tensorrt": str,  # of the headers
    "interface": str,  # IPluginV3, or IPluginV2DynamicExt of TensorRT 8.5
    "sm": list,  # compute capabilities with code, 87 for 8.7
    "ptx": list,  # those with PTX, which later GPUs compile
    "emulated": bool,  # runs on the CPU
    "operators": list,  # folders of plugins/
}


def build_record(path: Path) -> Dict[str, Any]:
    """RECORD_KEYS, and `machine`: the CPU that the library is for, as platform.machine() has it.

    Raises BadInput for a file that is not a library of edgepool's plugins.
    """
    try:
        with path.open("rb") as stream:
            machine, text = _read(stream)
        record = json.loads(text.decode("utf-8"))
    except (struct.error, ValueError, RecursionError) as error:
        raise BadInput("%s: not a library of edgepool's plugins: %s" % (path, error)) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise BadInput("%s: not a library of edgepool's plugins: its record is unknown" % path)
    if record.get("record") != VERSION:
        raise BadInput(
            "%s: its record has version %r, this edgepool reads %d: upgrade it, or run `edgepool "
            "build-plugins` again" % (path, record.get("record"), VERSION)
        )
    for key, kind in RECORD_KEYS.items():
        if type(record.get(key)) is not kind:
            raise BadInput("%s: its record has no usable '%s'" % (path, key))
    return {**{key: record[key] for key in RECORD_KEYS}, "machine": machine}


def _read(stream: BinaryIO) -> Tuple[str, bytes]:
    """The machine and the record's text of an ELF64 file; ValueError says what is wrong.

    The layout is that of the System V ABI (elf(5)): a header, and a table of sections.
    """
    header = stream.read(64)
    if header[:4] != b"\x7fELF":
        raise ValueError("it is no ELF file")
    if len(header) < 64 or header[4:6] != b"\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", header, 18)
    (offset,) = struct.unpack_from("<Q", header, 40)
    size, count, names_index = struct.unpack_from("<3H", header, 58)
    if size != 64 or not 0 < count <= MOST_SECTIONS or names_index >= count:
        raise ValueError("it has no table of sections: was it stripped, or copied in part?")
    table = _part(stream, offset, size * count)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, ...
    sections = list(struct.iter_unpack("<2I4Q2I2Q", table))
    names = _part(stream, sections[names_index][4], min(sections[names_index][5], LONGEST_NAMES))
    for section in sections:
        if names[section[0] : section[0] + len(SECTION) + 1] == SECTION + b"\0":
            if section[5] > LONGEST_RECORD:
                raise ValueError("its record is too long")
            text = _part(stream, section[4], section[5]).rstrip(b"\0")
            return MACHINES.get(machine, "machine %d" % machine), text
    raise ValueError("it has no section %s" % SECTION.decode())


def _part(stream: BinaryIO, offset: int, size: int) -> bytes:
    if offset + size > stream.seek(0, os.SEEK_END):
        raise ValueError("it ends early: was it copied in part?")
    stream.seek(offset)
    return stream.read(size)


# ------------------------------------------------------------------------------------ places


def default_folder(sm: int) -> Path:
    """Where `edgepool build-plugins` puts a library for GPUs of this compute capability."""
    return cache_folder() / "plugins" / ("sm_%d" % sm)


def installed() -> Optional[Path]:
    """The library that engines here are built with, or None without one.

    It comes with the package, or was built by this user with this version of edgepool for this CPU;
    of several, the last one. A file that others may have written is not considered.
    """
    packaged = resource("plugins") / NAME
    if packaged.is_file():
        return packaged
    usable = [path for path in _built() if _is_usable(path)]
    return max(usable, key=lambda path: path.stat().st_mtime, default=None)


def _built() -> Iterator[Path]:
    return iter(sorted((cache_folder() / "plugins").glob("*/" + NAME)))


def _is_private(path: Path) -> bool:
    """Whether only this user, or root, can have written the file and its folder."""
    for part in (path, path.parent):
        status = part.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


def _is_usable(path: Path) -> bool:
    if not _is_private(path):
        return False
    try:
        record = build_record(path)
    except BadInput:
        return False
    return (
        record["version"] == __version__
        and record["machine"] == platform.machine()
        and not record["emulated"]
    )
