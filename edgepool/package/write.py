"""Writing a package: the same files give the same bytes, on every machine."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterator, List, Tuple

from .. import files
from ..errors import BadInput
from ..progress import Report, silent
from .listing import BLOCK, Listing, Member, is_member_name


def measure(sources: Dict[str, Path], report: Report = silent) -> Tuple[Member, ...]:
    """The members of a package of files, by name of member, as its list has them.

    Raises BadInput for a name that no member can have.
    """
    for name, source in sources.items():
        if not is_member_name(name):
            raise BadInput("%s: %r is no name for a member of a package" % (source, name))
    total = sum(source.stat().st_size for source in sources.values())
    advance = _advance("hashing (MiB)", total, report)
    return tuple(_measure(name, sources[name], advance) for name in sorted(sources))


def write(path: Path, listing: Listing, sources: Dict[str, Path], report: Report = silent) -> None:
    """Write the package of files that were measured; none is held in memory.

    Raises BadInput for a file that has changed since, and a disk that is too full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(str(path.parent)).free
    if listing.total_bytes > free:
        raise BadInput(
            "%s: the package has %.1f GB and the disk has %.1f GB free: free some, or write "
            "elsewhere" % (path, listing.total_bytes / 1e9, free / 1e9)
        )
    advance = _advance("writing (MiB)", listing.content_bytes, report)
    with files.new_file(path) as stream:
        for segment in listing.segments():
            if segment.member is None:
                stream.write(segment.expected)
            else:
                _copy(sources[segment.name], segment.member, stream, advance)


def _measure(name: str, source: Path, advance: Callable[[int], None]) -> Member:
    """What the list says of a file. A program is one that names its interpreter: modes get lost
    in wheels, and differ between checkouts."""
    digest, size, executable = hashlib.sha256(), 0, False
    sums: List[str] = []
    for chunk in _chunks(source):
        executable = executable if size else chunk.startswith(b"#!")
        digest.update(chunk)
        sums.append("%08x" % zlib.crc32(chunk))
        size += len(chunk)
        advance(len(chunk))
    return Member(name, size, executable, digest.hexdigest(), "".join(sums))


def _copy(source: Path, member: Member, stream: BinaryIO, advance: Callable[[int], None]) -> None:
    digest = hashlib.sha256()
    for chunk in _chunks(source):
        digest.update(chunk)
        stream.write(chunk)
        advance(len(chunk))
    if digest.hexdigest() != member.sha256:
        raise BadInput("%s: it changed while it was packed: try again" % source)


def _chunks(source: Path) -> Iterator[bytes]:
    with source.open("rb") as stream:
        yield from iter(lambda: stream.read(BLOCK), b"")


def _advance(step: str, total: int, report: Report) -> Callable[[int], None]:
    """Counts bytes, and reports them in MiB."""
    steps, done = max(1, -(-total >> 20)), 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if done >> 20 > before >> 20 or done >= total:
            report(step, min(steps, done >> 20) if done < total else steps, steps)

    return advance
