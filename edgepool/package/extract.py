"""Unpacking a package: the folder gets its name when every byte was compared with the list."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from .. import files
from ..errors import BadInput
from ..progress import Report, silent
from .listing import LIST, Listing
from .read import Damage, contents, not_whole, opened, read_list


def extract(path: Path, folder: Path, report: Report = silent) -> Listing:
    """Unpack the package at `path` into a new folder, which is there whole or not at all.

    Raises BadInput for a file that is no package, a list that names files outside the folder, a
    folder that is not empty and a disk that is too full; GateFailed for a package that is not
    whole.
    """
    check_new(folder)
    with opened(path) as stream:
        listing = read_list(stream, path)
        check_space(folder, listing)
        with files.new_folder(folder) as staged:
            (staged / LIST).write_bytes(listing.to_json())
            try:
                chunks = contents(stream, listing, report)
                for member, pairs in itertools.groupby(chunks, key=lambda pair: pair[0]):
                    place = staged.joinpath(*member.name.split("/"))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("xb") as file:
                        for _, chunk in pairs:
                            file.write(chunk)
                    place.chmod(0o755 if member.executable else 0o644)
            except Damage as damage:
                raise not_whole(stream, path, listing, damage) from None
            # The container's user reads the bundle, whatever this user's umask is.
            (staged / LIST).chmod(0o644)
            for parent, _, _ in os.walk(str(staged)):
                os.chmod(parent, 0o755)
    return listing


def check_new(folder: Path) -> None:
    """Raise BadInput for a folder that holds something: engines that were built there, say."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BadInput("%s: it exists and is not a folder: choose another" % folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput("%s: the folder is not empty: choose another, or remove it first" % folder)


def check_space(folder: Path, listing: Listing) -> None:
    """Raise BadInput when the disk cannot hold what the list says."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    needed, free = listing.content_bytes, shutil.disk_usage(str(existing)).free
    if needed > free:
        raise BadInput(
            "%s: the package needs %.1f GB and the disk has %.1f GB free: free some, or extract it "
            "elsewhere" % (folder, needed / 1e9, free / 1e9)
        )
