"""Which engine files this user may load: those built here, by their sha256.

An engine is code. One that came with a bundle, or was copied from elsewhere, is loaded only if its
digest is in a file that only this user can write.
"""

from __future__ import annotations

import json
import os
import stat
from typing import List

from .. import files
from ..errors import BadInput
from ..resources import cache_folder

RECORD = "engines.json"


def remember(digest: str) -> None:
    """Add the sha256 of an engine built here."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = built_here()
    if digest in known:
        return
    with files.new_file(folder / RECORD) as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(json.dumps([*known, digest]).encode("ascii"))


def built_here() -> List[str]:
    """Digests of the engines that this user built.

    Raises BadInput for a record that others can write.
    """
    path = cache_folder() / RECORD
    try:
        descriptor = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput("%s: cannot be read: %s" % (path, error.strerror)) from error
    with os.fdopen(descriptor) as stream:
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise BadInput(
                "%s: others can read or write it, so it proves nothing: delete it, and build the "
                "engines again" % path
            )
        try:
            digests = json.load(stream)
        except ValueError as error:
            raise BadInput("%s: damaged: delete it, and build the engines again" % path) from error
    if not isinstance(digests, list) or not all(isinstance(d, str) for d in digests):
        raise BadInput("%s: damaged: delete it, and build the engines again" % path)
    return digests
