"""The form of a package: a plain tar, every byte of which follows from its list and its content.

    package.json     first: the target, and name, size, mode and sums of every other member
    bundle/...       the others, sorted by name

So reading one is comparing it with what its own list says: a link, a device, another member, a
second one of the same name or a flipped byte of a header is a difference, and never interpreted.
The list itself is checked as something that anyone may have written.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

FORMAT, VERSION = "edgepool-package", 1
LIST = "package.json"
LARGEST_LIST = 64 << 20

SECTOR = 512  # of a tar: headers are one, content is padded to one
RECORD = 20 * SECTOR  # of which the whole file has a whole number
BLOCK = 1 << 16  # bytes of content with a CRC-32 of their own, which says where damage is
LARGEST_USTAR = 8**11  # sizes from here on do not fit into a header's octal digits
# Every member's: 1980-01-01 UTC, the first moment that zip files know too. GNU tar warns of 0.
MODIFIED = 315532800

_NAME = re.compile(r"[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*")
_HEX = re.compile(r"([0-9a-f]{8})*")


@dataclass(frozen=True)
class Member:
    """A file of a package. crc32: of every BLOCK of it, as 8 hexadecimal digits each."""

    name: str
    bytes: int
    executable: bool
    sha256: str
    crc32: str


@dataclass(frozen=True)
class Listing:
    """What package.json says. source_digest: sha256 of the model.pt that the bundle came from."""

    edgepool: str
    target: str
    source_digest: str
    members: Tuple[Member, ...]

    def to_json(self) -> bytes:
        """package.json: these values, and a digest of them."""
        return canonical({"format": FORMAT, "version": VERSION, **asdict(self)})

    @property
    def content_bytes(self) -> int:
        """What the members take on a disk."""
        return sum(member.bytes for member in self.members)

    @property
    def total_bytes(self) -> int:
        """The size of the whole file."""
        *_, last = self.segments()
        return last.start + len(last.expected)

    def segments(self) -> Iterator[Segment]:
        """The file in order."""
        text = self.to_json()
        start = 0
        for member in (Member(LIST, len(text), False, "", ""), *self.members):
            head = header(member.name, member.bytes, member.executable)
            yield Segment(start, member.name, "the header of %s" % member.name, head)
            start += len(head)
            if member.name == LIST:
                yield Segment(start, LIST, LIST, text)
            else:
                yield Segment(start, member.name, member.name, b"", member)
            start += member.bytes
            padding = bytes(-member.bytes % SECTOR)
            yield Segment(start, member.name, "the padding after %s" % member.name, padding)
            start += len(padding)
        end = bytes(2 * SECTOR + -(start + 2 * SECTOR) % RECORD)
        yield Segment(start, "", "the end of the archive", end)


class Segment(NamedTuple):
    """A part of the file: the bytes expected there, or the content of `member`."""

    start: int
    name: str  # of the member that it belongs to
    what: str  # for people
    expected: bytes
    member: Optional[Member] = None


def header(name: str, size: int, executable: bool) -> bytes:
    """What precedes a member: POSIX ustar, and a pax record of the size where that is too large.

    tarfile would write it too, but fills the fields of devices by the version of Python.
    """
    if size < LARGEST_USTAR:
        return _ustar(name, size, executable, b"0")
    record = b" size=%d\n" % size
    length = len(record) + 2  # the length counts its own two digits
    record = b"%d%s" % (length, record)
    return b"".join(
        (
            _ustar("size-of/" + LIST, len(record), False, b"x"),
            record.ljust(SECTOR, b"\0"),
            _ustar(name, 0, executable, b"0"),
        )
    )


def _ustar(name: str, size: int, executable: bool, kind: bytes) -> bytes:
    def block(checksum: bytes) -> bytes:
        return struct.pack(
            "100s8s8s8s12s12s8sc100s8s32s32s183x",
            name.encode("ascii"),
            b"0000755\0" if executable else b"0000644\0",
            b"0000000\0",  # user and group: root
            b"0000000\0",
            b"%011o\0" % size,
            b"%011o\0" % MODIFIED,
            checksum,
            kind,
            b"",
            b"ustar\x0000",
            b"root",
            b"root",
        )

    return block(b"%06o\0 " % sum(block(b" " * 8)))


def canonical(record: Dict[str, Any]) -> bytes:
    """JSON of one form only, with `digest`: the sha256 of the shortest JSON of the others."""
    values = {key: value for key, value in record.items() if key != "digest"}
    shortest = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["digest"] = hashlib.sha256(shortest.encode("ascii")).hexdigest()
    return json.dumps(values, indent=1, sort_keys=True).encode("ascii") + b"\n"


def intact(data: bytes) -> Optional[Dict[str, Any]]:
    """The values in package.json, or None if these are not the bytes that were written."""
    try:
        record = json.loads(data.decode("ascii"))
        return record if isinstance(record, dict) and canonical(record) == data else None
    except (ValueError, RecursionError):
        return None


def parse(record: Dict[str, Any]) -> Listing:
    """The list of a package; raises ValueError, in words for people, for one of no use."""
    if record.get("format") != FORMAT:
        raise ValueError("it is no list of a package")
    if record.get("version") != VERSION:
        raise ValueError(
            "version %r of the format; this edgepool reads version %d"
            % (record.get("version"), VERSION)
        )
    texts = [record.get(key) for key in ("edgepool", "target", "source_digest")]
    members = record.get("members")
    if not (isinstance(members, list) and all(isinstance(text, str) for text in texts)):
        raise ValueError("it lacks what a list has")
    edgepool, target, source_digest = map(str, texts)
    listing = Listing(edgepool, target, source_digest, tuple(map(_member, members)))
    _check_names([member.name for member in listing.members])
    if canonical(record) != listing.to_json():
        raise ValueError("it has what no list has")
    return listing


def _member(record: Any) -> Member:
    kinds: Dict[str, type] = {
        "name": str, "bytes": int, "executable": bool, "sha256": str, "crc32": str
    }  # fmt: skip
    if not isinstance(record, dict) or set(record) != set(kinds):
        raise ValueError("a member lacks what members have")
    for key, kind in kinds.items():
        if type(record[key]) is not kind:
            raise ValueError("a member has no usable '%s'" % key)
    member = Member(**record)
    blocks = -(-member.bytes // BLOCK)
    if not 0 <= member.bytes < 1 << 60:
        raise ValueError("'%.100s' has no usable size" % member.name)
    if len(member.crc32) != 8 * blocks or not _HEX.fullmatch(member.crc32):
        raise ValueError("'%.100s' has no usable CRC-32s" % member.name)
    return member


def _check_names(names: List[str]) -> None:
    """Raise ValueError unless the names are files of one folder, each once, and sorted."""
    for name in names:
        if not is_member_name(name):
            raise ValueError("%.120r is no name for a member" % name)
    if names != sorted(set(names)):
        raise ValueError("its members are not sorted, or one is there twice")
    folders = {name[:i] for name in names for i, letter in enumerate(name) if letter == "/"}
    for name in names:
        if name in folders:
            raise ValueError("'%s' is a file and a folder" % name)


def is_member_name(name: str) -> bool:
    """Whether a name leads to a file inside the folder, everywhere, and fits into a header."""
    return (
        bool(_NAME.fullmatch(name))
        and len(name) <= 100
        and name != LIST
        and not any(part.strip(".") == "" for part in name.split("/"))
    )
