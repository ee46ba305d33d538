"""Reading a package, byte by byte against its list: whole, or where it is not what it should be."""

from __future__ import annotations

import hashlib
import os
import shlex
import zlib
from pathlib import Path
from typing import BinaryIO, Iterator, Optional, Tuple

from ..errors import BadInput, EdgepoolError, GateFailed
from ..progress import Report, silent
from .listing import (
    BLOCK,
    LARGEST_LIST,
    LIST,
    SECTOR,
    Listing,
    Member,
    Segment,
    header,
    intact,
    parse,
)

START = LIST.encode("ascii") + b"\0"  # how every package begins


class Damage(Exception):
    """The bytes from `start` up to `end` are not what the list says; `what` they belong to."""

    def __init__(self, what: str, start: int, end: int):
        super().__init__(what)
        self.what, self.start, self.end = what, start, end


def verify(path: Path, report: Report = silent) -> Listing:
    """Read a package through; returns its list.

    Raises BadInput for a file that is no package, GateFailed, which names the member and the place,
    for one that is not whole.
    """
    with opened(path) as stream:
        listing = read_list(stream, path)
        try:
            for _ in contents(stream, listing, report):
                pass
        except Damage as damage:
            raise not_whole(stream, path, listing, damage) from None
    return listing


def opened(path: Path) -> BinaryIO:
    """The file; raises BadInput where it cannot be read."""
    try:
        if path.is_dir():
            raise BadInput("%s: is a folder; a package is a .tar file" % path)
        return path.open("rb")
    except OSError as error:
        raise BadInput("%s: cannot be read: %s" % (path, error.strerror)) from error


def read_list(stream: BinaryIO, path: Path) -> Listing:
    """package.json of a package, itself whole."""
    first = stream.read(SECTOR)
    if not (first.startswith(START) or first[257:265] == b"ustar\x0000"):
        raise BadInput("%s: not a package: `edgepool package` makes one" % path)
    size = _list_size(first)
    if size is None and len(first) == SECTOR:
        raise _damaged(path, Damage("the header of %s" % LIST, 0, SECTOR))
    data = stream.read(size or 0)
    if size is None or len(data) < size:
        raise GateFailed(
            "%s: truncated in its list: it has %d bytes: copy it again"
            % (path, len(first) + len(data))
        )
    record = intact(data)
    if record is None:
        raise _damaged(path, Damage(LIST, SECTOR, SECTOR + size))
    try:
        listing = parse(record)
    except ValueError as error:
        raise BadInput("%s: its %s cannot be used: %s" % (path, LIST, error)) from error
    stream.seek(0)
    return listing


def _list_size(first: bytes) -> Optional[int]:
    """The size of package.json by its header; None where that is not what is written there."""
    digits = first[124:135]
    if not digits.isdigit():
        return None
    size = int(digits, 8) if not set(digits) & set(b"89") else 0
    return size if first == header(LIST, size, False) and size <= LARGEST_LIST else None


def contents(
    stream: BinaryIO, listing: Listing, report: Report = silent
) -> Iterator[Tuple[Member, bytes]]:
    """What every member holds, in chunks of BLOCK, an empty one for an empty member.

    A chunk is given out only after it was compared. Raises Damage at the first difference.
    """
    steps, done = max(1, listing.content_bytes >> 20), 0
    for segment in listing.segments():
        if segment.member is None:
            _compare(stream, segment)
            continue
        for member, chunk in _content(stream, segment, segment.member):
            yield member, chunk
            done += len(chunk)
            if done >> 20 > done - len(chunk) >> 20:
                report("reading (MiB)", min(done >> 20, steps - 1), steps)
    if stream.read(1):
        end = listing.total_bytes
        raise Damage("what comes after the end", end, end + 1)
    report("reading (MiB)", steps, steps)


def _read(stream: BinaryIO, size: int) -> bytes:
    """Like its `read`; raises BadInput where the disk cannot."""
    try:
        return stream.read(size)
    except OSError as error:
        raise BadInput("%s: cannot be read: %s" % (stream.name, error.strerror)) from error


def _compare(stream: BinaryIO, segment: Segment) -> None:
    expected = segment.expected
    found = _read(stream, len(expected))
    if found != expected:
        pairs = enumerate(zip(found, expected))
        at = next((i for i, (mine, right) in pairs if mine != right), len(found))
        raise Damage(segment.what, segment.start + at, segment.start + at + 1)


def _content(stream: BinaryIO, segment: Segment, member: Member) -> Iterator[Tuple[Member, bytes]]:
    digest = hashlib.sha256()
    for number, start in enumerate(range(0, member.bytes, BLOCK)):
        length = min(BLOCK, member.bytes - start)
        chunk = _read(stream, length)
        if "%08x" % zlib.crc32(chunk) != member.crc32[8 * number : 8 * number + 8]:
            begin = segment.start + start
            raise Damage(segment.what, begin, begin + length)
        digest.update(chunk)
        yield member, chunk
    if digest.hexdigest() != member.sha256:
        raise Damage(segment.what, segment.start, segment.start + member.bytes)
    if not member.bytes:
        yield member, b""


# ------------------------------------------------------------------------------- what is wrong


def not_whole(stream: BinaryIO, path: Path, listing: Listing, damage: Damage) -> EdgepoolError:
    """The error for a package that differs from its list, by how copies usually go wrong."""
    size, whole = os.fstat(stream.fileno()).st_size, listing.total_bytes
    if damage.start >= whole:
        return GateFailed(
            "%s: %d bytes too long: the package ends at byte %d: cut it there "
            "(`truncate -s %d %s`), or copy it again"
            % (path, size - whole, whole, whole, shlex.quote(str(path)))
        )
    again = _begins_again(stream, damage)
    if again is not None:
        return GateFailed(
            "%s: it begins again at byte %d, as a copy does that was resumed from the start: "
            "copy it again" % (path, again)
        )
    if size < whole and damage.end > size:
        return GateFailed(
            "%s: truncated in %s: it has %d of %d bytes, and those before byte %d are right: "
            "resume the copy, or copy it again" % (path, damage.what, size, whole, damage.start)
        )
    empty = _empty_from(stream, listing, damage)
    if empty is not None:
        return GateFailed(
            "%s: from byte %d on, in %s, it is empty: the copy was not finished: resume it there, "
            "or copy it again" % (path, empty, damage.what)
        )
    return _damaged(path, damage)


def _damaged(path: Path, damage: Damage) -> EdgepoolError:
    place = "at byte %d" % damage.start
    if damage.end > damage.start + 1:
        place = "between bytes %d and %d" % (damage.start, damage.end - 1)
    return GateFailed("%s: damaged in %s, %s: copy it again" % (path, damage.what, place))


def _begins_again(stream: BinaryIO, damage: Damage) -> Optional[int]:
    """Where the first header comes once more, not far from where the damage was found."""
    stream.seek(0)
    first = stream.read(SECTOR)
    begin = max(1, damage.start - SECTOR)  # what is right may begin as the header does
    stream.seek(begin)
    found = stream.read(damage.end - begin + SECTOR).find(first)
    return None if found < 0 else begin + found


def _empty_from(stream: BinaryIO, listing: Listing, damage: Damage) -> Optional[int]:
    """Where nothing but zeros begins, if that is in the damage and something should follow it."""
    *_, content, _, _ = listing.segments()
    if damage.end > content.start:
        return None
    stream.seek(damage.start)
    data = stream.read(damage.end - damage.start).rstrip(b"\0")
    rest = iter(lambda: stream.read(BLOCK), b"")
    return None if any(chunk.strip(b"\0") for chunk in rest) else damage.start + len(data)
