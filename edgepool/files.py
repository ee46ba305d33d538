"""Files and folders: written whole or not at all, kept inside a folder, digested.

What is written stands beside its place as `.NAME.PID.tmp` first, is forced to the disk, and takes
its place by a rename, so that a killed process or a power cut leaves the old or the new one. A
block that fails leaves nothing; what a killed process left goes when the same name is next written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO, Iterator

from .errors import BadInput

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_WRITE = (
    *NO_SPACE,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EIO,
)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file `path` when the block ends without an error.

    Raises BadInput for a path that cannot be written, and when the disk is full.
    """
    with _beside(path) as temporary:
        if path.is_dir():
            raise BadInput("%s: is a folder; name a file to write" % path)
        with open(str(temporary), "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(str(temporary), str(path))
        _sync_folder(path.parent)


@contextlib.contextmanager
def new_files(path: Path) -> Iterator[Path]:
    """A folder whose files move to the folder of `path` when the block ends; `path` comes last.

    Raises BadInput as `new_file`.
    """
    with _beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == path.name):
            os.replace(str(file), str(path.with_name(file.name)))
        _sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the place of the folder `path` when the block ends without an error.

    What stands at `path` is untouched until then, and gone afterwards. Raises BadInput as
    `new_file`.
    """
    with _beside(path) as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        _exchange(temporary, path)
        _sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that are gone left beside `path` of their writing it."""
    for leftover in path.parent.glob(glob.escape(".%s." % path.name) + "*.tmp"):
        pid = leftover.name[len(path.name) + 2 : -len(".tmp")]
        if pid.isdigit() and not _runs(int(pid)):
            _remove(leftover)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """The temporary name for `path`, under which there is nothing before and after the block."""
    temporary = path.with_name(".%s.%d.tmp" % (path.name, os.getpid()))
    remove_leftovers(path)
    try:
        yield temporary
    except OSError as error:
        named = str(error.filename or "")
        ours = named == str(path.parent) or named.startswith(str(temporary))
        if error.errno in NO_SPACE:
            message = "%s: no space left to write it: free some, or write elsewhere" % path
        elif ours or error.errno in CANNOT_WRITE:
            message = "%s: cannot be written: %s" % (path, error.strerror)
        else:
            raise
        raise BadInput(message) from error
    finally:
        _remove(temporary)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _remove(path: Path) -> None:
    if os.path.isdir(str(path)) and not os.path.islink(str(path)):
        shutil.rmtree(str(path), ignore_errors=True)
    elif os.path.lexists(str(path)):
        os.unlink(str(path))


def _exchange(new: Path, path: Path) -> None:
    """Put `new` at `path`; what was there is then at `new`. Atomic where the kernel can.

    Where it cannot, the old folder is put back if the new one cannot take its place.
    """
    if not path.exists():
        os.rename(str(new), str(path))
        return
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        done = False
    else:
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of renameat2(2)
        names = os.fsencode(str(new)), os.fsencode(str(path))
        done = renameat2(at_cwd, names[0], at_cwd, names[1], exchange) == 0
    if not done:
        aside = new.with_name(new.name + ".old")
        os.rename(str(path), str(aside))
        try:
            os.rename(str(new), str(path))
        except OSError:
            os.rename(str(aside), str(path))
            raise
        os.rename(str(aside), str(new))


def _sync(folder: Path) -> None:
    """Force a folder with all it holds to the disk."""
    for parent, _, names in os.walk(str(folder)):
        for name in names:
            with open(os.path.join(parent, name), "rb") as stream:
                os.fsync(stream.fileno())
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def confined(folder: Path, name: str) -> Path:
    """folder / name, if that is an existing file inside the folder; otherwise raises BadInput."""
    parts = Path(name).parts
    if not parts or os.path.isabs(name) or ".." in parts or "\\" in name:
        raise BadInput("%s: '%s' leads out of the folder" % (folder, name))
    if not name.isprintable():  # NUL and half surrogates, which no system call takes, among them
        raise BadInput("%s: %r is no name for a file" % (folder, name))
    path = folder.joinpath(*parts)
    inside = os.path.realpath(str(folder)) + os.sep
    if not os.path.realpath(str(path)).startswith(inside):
        raise BadInput("%s: '%s' is a link out of the folder" % (folder, name))
    if not os.path.isfile(str(path)):  # unlike Path's, it says no to a name that is too long
        raise BadInput("%s: the file is missing: copy the bundle again or export it anew" % path)
    return path


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 22), b""):
            digest.update(chunk)
    return digest.hexdigest()
