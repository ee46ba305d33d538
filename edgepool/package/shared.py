"""One copy of the weights for two graphs of a bundle.

The portable graph and the one that was lowered for a target hold the same weights, each in its own
file. In a package, the portable one refers to those in the variant's file, in a folder below it:
that is external data of ONNX, which ONNX Runtime maps wherever it begins. (Not the other way round:
no reader takes external data from a folder above.)
"""

from __future__ import annotations

import contextlib
import posixpath
from pathlib import Path
from typing import Optional

from ..onnxfile import Place, places, skeleton

CHUNK = 1 << 22


def shared_graph(portable: Path, variant: Path, name: str) -> Optional[bytes]:
    """The portable graph with its weights in the files of the variant, `name` from its folder.

    None where a weight of the one is not, byte for byte, one of the other.
    """
    theirs = places(str(variant))
    for tensor, mine in places(str(portable)).items():
        if tensor not in theirs or not same(portable.parent, mine, variant.parent, theirs[tensor]):
            return None
    folder = posixpath.dirname(name)
    moved = {
        tensor: place._replace(location=posixpath.join(folder, place.location))
        for tensor, place in theirs.items()
    }
    return skeleton(str(portable), elsewhere=moved)


def same(folder: Path, mine: Place, their_folder: Path, theirs: Place) -> bool:
    """Whether two places hold the same bytes."""
    if mine.length < 0 or mine.length != theirs.length:
        return False
    with contextlib.ExitStack() as stack:
        a = stack.enter_context((folder / mine.location).open("rb"))
        b = stack.enter_context((their_folder / theirs.location).open("rb"))
        a.seek(mine.offset)
        b.seek(theirs.offset)
        for start in range(0, mine.length, CHUNK):
            size = min(CHUNK, mine.length - start)
            chunk = a.read(size)
            if len(chunk) < size or chunk != b.read(size):
                return False
    return True
