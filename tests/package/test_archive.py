"""Packages as files: every byte counts, however they were damaged or forged on the way."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgepool.errors import BadInput, EdgepoolError, GateFailed
from edgepool.package import extract as extracting
from edgepool.package.extract import extract
from edgepool.package.listing import BLOCK, LIST, RECORD, header
from edgepool.package.read import contents, verify
from edgepool.package.write import measure, write

from .archives import CONTENTS, forge, member, write_files, write_package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "orin.tar"
    write_package(path)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def parts_of(package: Path) -> list[tuple[int, str]]:
    """Where each member begins, its header included, as tarfile finds it; the end of the last."""
    with tarfile.open(package) as archive:
        members = archive.getmembers()
    last = members[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    return [(m.offset, m.name) for m in members] + [(end, "the end of the archive")]


def test_other_tools_read_it(package: Path, tmp_path: Path) -> None:
    with tarfile.open(package) as archive:
        names = archive.getnames()
        read = {name: archive.extractfile(name).read() for name in names}  # type: ignore[union-attr]
        executable = [m.name for m in archive.getmembers() if m.mode & 0o111]
    assert names == [LIST, *sorted(CONTENTS)]
    assert {name: content for name, content in read.items() if name != LIST} == CONTENTS
    assert executable == ["jetson/entrypoint"]
    result = subprocess.run(
        ["tar", "-xf", package, "-C", tmp_path], capture_output=True, text=True, check=True
    )
    assert not result.stderr
    assert files_in(tmp_path) == read
    assert os.access(tmp_path / "jetson/entrypoint", os.X_OK)


def test_extracted_is_what_was_packed(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with a space" / "orin"
    before = os.umask(0o077)  # the container's user has to read it all the same
    try:
        listing = extract(package, folder)
    finally:
        os.umask(before)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}
    found = files_in(folder)
    assert found.pop(LIST) == listing.to_json()
    assert found == CONTENTS
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in (LIST, *CONTENTS)}
    assert modes.pop("jetson/entrypoint") == 0o755
    assert set(modes.values()) == {0o644}


def test_the_same_files_give_the_same_bytes(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "again.tar"
    sources = write_files(tmp_path / "elsewhere", dict(reversed(CONTENTS.items())))
    for source in sources.values():
        os.utime(source, (1, 1))
        source.chmod(0o600)
    listing = verify(package)
    assert measure(sources) == listing.members
    write(path, listing, sources)
    assert path.read_bytes() == package.read_bytes()


def test_intact(package: Path) -> None:
    assert verify(package).target == "jetson-agx-orin"
    assert package.stat().st_size == verify(package).total_bytes
    assert package.stat().st_size % RECORD == 0


@settings(max_examples=150)
@given(share=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_a_flipped_byte_is_named(package: Path, scratch: Path, share: float, change: int) -> None:
    content = bytearray(package.read_bytes())
    check_flip(package, scratch / "flipped.tar", int(share * len(content)), change)


def test_a_flipped_byte_of_a_header_is_named(package: Path, scratch: Path) -> None:
    """Of two headers every byte, whatever tar readers make of it."""
    starts = [start for start, _ in parts_of(package)]
    for start in (starts[0], starts[4]):
        for offset in range(start, start + 512):
            check_flip(package, scratch / "header.tar", offset, 0x20)


def check_flip(package: Path, path: Path, offset: int, change: int) -> None:
    content = bytearray(package.read_bytes())
    content[offset] ^= change
    path.write_bytes(content)
    name = [name for start, name in parts_of(package) if start <= offset][-1]
    with pytest.raises(GateFailed) as failure:
        verify(path)
    said = str(failure.value)
    assert f"damaged in {name}," in said or f" {name}, " in said
    place = re.search(r"at byte (\d+)|between bytes (\d+) and (\d+)", said)
    assert place is not None
    exact, first, last = place.groups()
    low, high = (int(exact), int(exact)) if exact else (int(first), int(last))
    assert low <= offset <= high
    if name != LIST:
        assert high - low < BLOCK


@settings(max_examples=100)
@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0)
@example(share=1e-9)
@example(share=0.999999)
def test_a_truncated_copy(package: Path, scratch: Path, share: float) -> None:
    content = package.read_bytes()
    size = int(share * len(content))
    path = scratch / "truncated.tar"
    path.write_bytes(content[:size])
    with pytest.raises((GateFailed, BadInput)) as failure:
        verify(path)
    if size <= len(LIST):
        assert "not a package" in str(failure.value)
        return
    assert "truncated" in str(failure.value)
    whole = re.search(r"those before byte (\d+) are right", str(failure.value))
    if whole:  # a copy that goes on from there is whole
        assert size - BLOCK <= int(whole.group(1)) <= size
    with pytest.raises(EdgepoolError):
        extract(path, scratch / "nothing")
    assert not (scratch / "nothing").exists()


@settings(max_examples=60)
@given(share=st.floats(0.06, 0.9))
def test_copies_that_were_resumed_wrongly(package: Path, scratch: Path, share: float) -> None:
    content = package.read_bytes()
    cut = int(share * len(content))
    last = max(start for start, _ in parts_of(package)[:-1])
    path = scratch / "resumed.tar"
    wrong = {
        "begins again at byte %d," % cut: content[:cut] + content,
        r"too long: the package ends at byte %d: .* -s %d \S*resumed.tar`"
        % (len(content), len(content)): content + content,
        "too long": content + bytes(1),
        "damaged|truncated": content[:cut] + content[cut + 700 :],  # a part left out
        "damaged|begins|too long": content[:cut] + content[cut - 700 :],  # a part there twice
    }
    if cut + BLOCK < last:
        begin = len(content[:cut].rstrip(b"\0"))  # some of what is right may be empty too
        wrong["from byte (%d|%d) on" % (begin, cut)] = content[:cut].ljust(len(content), b"\0")
    for said, copy in wrong.items():
        path.write_bytes(copy)
        with pytest.raises(GateFailed, match=said):
            verify(path)


KINDS = {
    "file": tarfile.REGTYPE,
    "symbolic link": tarfile.SYMTYPE,
    "hard link": tarfile.LNKTYPE,
    "folder": tarfile.DIRTYPE,
    "device": tarfile.CHRTYPE,
    "block device": tarfile.BLKTYPE,
    "pipe": tarfile.FIFOTYPE,
    "sparse": tarfile.GNUTYPE_SPARSE,
    "contiguous": tarfile.CONTTYPE,
}
NAMES = st.sampled_from(
    ["a", "a/b", "../a", "/a", "a/../../a", "a/./b", "bundle/model.onnx", ".", "..", "a\\b", LIST]
) | st.text("ab./\\~ ", min_size=1, max_size=12)


@settings(max_examples=200)
@given(
    entries=st.lists(
        st.tuples(NAMES, st.sampled_from(sorted(KINDS)), NAMES, st.binary(max_size=20)),
        min_size=1,
        max_size=4,
    ),
    listed=st.booleans(),
)
def test_hostile_archives_write_nothing(
    scratch: Path, entries: list[tuple[str, str, str, bytes]], listed: bool
) -> None:
    """Links, devices, names that lead out and members twice, listed or not."""
    infos = []
    for name, kind, link, content in entries:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = KINDS[kind], link
        infos.append((info, content if kind == "file" else b""))
    members = [member(info.name, content) for info, content in infos] if listed else []
    yard = scratch / "yard"
    shutil.rmtree(yard, ignore_errors=True)
    yard.mkdir()
    path = forge(scratch / "hostile.tar", members, infos)
    with pytest.raises(EdgepoolError):
        extract(path, yard / "out")
    assert not list(yard.iterdir())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["../a"], "'../a' is no name for a member"),
        (["/etc/passwd"], "is no name"),
        (["a/../b"], "is no name"),
        (["a//b"], "is no name"),
        (["a\\b"], "is no name"),
        (["a\0b"], "is no name"),
        (["a\nb"], "is no name"),
        (["\u00e9"], "is no name"),
        (["a" * 101], "is no name"),
        ([LIST], "is no name"),
        (["a", "a"], "one is there twice"),
        (["b", "a"], "not sorted"),
        (["a", "a/b"], "'a' is a file and a folder"),
    ],
)
def test_names_in_a_list_that_are_refused(tmp_path: Path, names: list[str], said: str) -> None:
    path = forge(tmp_path / "p.tar", [member(name) for name in names], [])
    for refusing in (verify, lambda path: extract(path, tmp_path / "out")):
        with pytest.raises(BadInput, match=re.escape(said)):
            refusing(path)
    assert not (tmp_path / "out").exists()


def test_a_list_that_claims_more_than_there_is(tmp_path: Path) -> None:
    """Sizes are held against the disk before anything is written, and against the file."""
    blocks = 1 << 10
    huge = replace(member("a"), bytes=blocks * BLOCK, crc32="00000000" * blocks)
    path = forge(tmp_path / "p.tar", [huge], [])
    with pytest.raises(GateFailed, match="in the header of a, it is empty"):
        extract(path, tmp_path / "out")
    with pytest.raises(BadInput, match="'a' has no usable CRC-32s"):
        verify(forge(path, [replace(huge, bytes=1 << 50)], []))
    with pytest.raises(BadInput, match="'a' has no usable size"):
        verify(forge(path, [replace(huge, bytes=-1)], []))
    assert not (tmp_path / "out").exists()


def test_no_space(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(extracting.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BadInput, match="the disk has 0.0 GB free"):
        extract(package, tmp_path / "a" / "out")
    with pytest.raises(BadInput, match="the disk has 0.0 GB free"):
        write_package(tmp_path / "p.tar")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "p.tar").exists()


FULL = """
import resource, sys
from pathlib import Path
from edgepool.errors import BadInput
from edgepool.package.extract import extract
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
except BadInput as error:
    print(error)
"""


def test_a_disk_that_fills_up_meanwhile(package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, package, tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "no space left to write it" in result.stdout
    assert not list(tmp_path.iterdir())


def test_folders_that_are_not_touched(package: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "engine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("full", "file", "link"):
        with pytest.raises(BadInput):
            extract(package, tmp_path / name)
    assert (tmp_path / "full" / "engine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    extract(package, tmp_path / "empty")
    assert (tmp_path / "empty" / LIST).exists()


@pytest.mark.parametrize("content", [b"", b"x" * 9000, bytes(20000)])
def test_what_is_no_package(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.tar"
    path.write_bytes(content)
    for wrong in (path, tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput):
            verify(wrong)


def test_a_disk_that_cannot_be_read(package: Path) -> None:
    class Failing(io.BytesIO):
        name = "card/p.tar"

        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 20_000:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    with pytest.raises(BadInput, match="card/p.tar: cannot be read: Input/output error"):
        list(contents(Failing(package.read_bytes()), verify(package)))


def test_another_tar_is_no_package(tmp_path: Path) -> None:
    path = tmp_path / "p.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(__file__, "a")
    with pytest.raises(EdgepoolError, match="damaged in the header of package.json"):
        verify(path)


def test_a_later_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.tar"
    with monkeypatch.context() as later:
        later.setattr("edgepool.package.listing.VERSION", 2)
        write_package(path)
    with pytest.raises(BadInput, match="version 2 of the format; this edgepool reads version 1"):
        verify(path)


@pytest.mark.parametrize("size", [0, 8**11 - 1, 8**11, 10**12, (1 << 60) - 1])
def test_sizes_beyond_a_header(size: int) -> None:
    head = io.BytesIO(header("bundle/model.onnx.data", size, False))
    with tarfile.open(fileobj=head) as archive:
        read = archive.next()
    assert read is not None
    assert (read.name, read.size, read.type) == ("bundle/model.onnx.data", size, tarfile.REGTYPE)


def test_a_file_that_changes_while_it_is_packed(tmp_path: Path) -> None:
    listing = write_package(tmp_path / "p.tar")
    sources = write_files(tmp_path / "changed", {**CONTENTS, "bundle/sector": b"t" * 512})
    with pytest.raises(BadInput, match="it changed while it was packed"):
        write(tmp_path / "q.tar", listing, sources)
    assert not (tmp_path / "q.tar").exists()


# The peak is asked of the kernel: Python's ru_maxrss of a child starts at the parent's size.
PEAK = """
import re, sys
from pathlib import Path
from edgepool.package.extract import extract
from edgepool.package.listing import Listing
from edgepool.package.write import measure, write
def peak():
    return int(re.search("VmHWM:(.*) kB", Path("/proc/self/status").read_text()).group(1))
folder = Path(sys.argv[1])
sources = {"weights": folder / "weights"}
before = peak()
listing = Listing("0.1", "t", "0", measure(sources))
write(folder / "p.tar", listing, sources)
extract(folder / "p.tar", folder / "out")
print(peak() - before)
"""


def test_no_file_is_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(200 << 20)
    command = [sys.executable, "-c", PEAK, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(result.stdout) < 20 << 10  # KiB
    assert (tmp_path / "out" / "weights").stat().st_size == 200 << 20
