"""`edgepool doctor`: does this machine have what engines need?"""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import MissingRequirement
from . import console


def command(
    sysroot: Path = typer.Option(
        Path("/"), help="Look at the machine whose files are in this folder, a board's disk say."
    ),
    json: bool = console.JSON,
) -> None:
    """Show what this machine has of CUDA, TensorRT, plugins, GPU, JetPack, Python, memory and disk.

    Only files are read: nothing is executed and no library is loaded.

    \b
    Examples:
      edgepool doctor
      edgepool doctor --json
      edgepool doctor --sysroot /mnt/board
    """
    from ..engine.doctor import examine
    from ..engine.line import OK

    lines = examine(sysroot)
    bad = [line.name for line in lines if line.state != OK]
    if json:
        console.print_json({"ok": not bad, "lines": [dict(vars(line)) for line in lines]})
    else:
        rows = [[line.name, line.state, line.found, line.fix] for line in lines]
        console.print_table(["", "", "found", "do"], rows)
        places = [[line.name, line.path] for line in lines if line.path]
        print()
        console.print_table(["", "is in"], places)
    if bad:
        raise MissingRequirement(
            "not as engines need it: %s: see above what to do" % ", ".join(bad)
        )
    console.note("this machine has what engines need")
