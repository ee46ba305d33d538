"""What commands print: results on stdout, progress and notes on stderr.

    console.print_json(record)                     # for --json: `json: bool = console.JSON`
    console.print_table(["layer", "bytes"], rows)  # at most 100 columns wide
    console.note("wrote edgepool-bundle/")         # one line on stderr
    console.bytes_text(3 << 20)                    # '3.0 MiB'

    with console.progress() as report:             # a bar on a terminal, else plain lines
        library_function(..., report=report)

A library function that takes long accepts `report: Report` (edgepool/progress.py) and calls
`report("writing tensors", done, total)` as it goes; `done == total` ends the step. It never prints.
Colours appear on a terminal only, and never when NO_COLOR is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, TextIO

import typer

from ..config import suggest
from ..errors import BadInput
from ..progress import Report

WIDTH = 100
PLAIN_INTERVAL = 5.0  # seconds between two progress lines at first, without a terminal

JSON = typer.Option(False, "--json", help="Print one JSON object on stdout instead of text.")


def error(message: str) -> None:
    """Print `error: message` on stderr, as one line."""
    label = "\033[31merror:\033[0m" if _coloured(sys.stderr) else "error:"
    print(label, " ".join(message.split()), file=sys.stderr)


def note(message: str) -> None:
    """Print a line for the person on stderr, so that stdout holds results only."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print `value` on stdout as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def one_of(option: str, value: Optional[str], known: Sequence[str]) -> None:
    """Raise BadInput, which names the nearest, for a value that is not one of those known."""
    if value is not None and value not in known:
        raise BadInput(
            "%s: %r is not one of %s%s" % (option, value, ", ".join(known), suggest(value, known))
        )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows under headings on stdout, wrapped to the terminal and to WIDTH columns.

    A column whose cells all begin with a digit, a sign or a point is aligned to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    table = Table(box=None, title=title or None, title_justify="left", pad_edge=False)
    for i, heading in enumerate(columns):
        numeric = all(row[i][:1] in "0123456789+-.<>" for row in texts)
        table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for row in texts:
        table.add_row(*[Text(cell) for cell in row])
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    lines = Console(width=width, no_color=not _coloured(sys.stdout), highlight=False)
    with lines.capture() as captured:
        lines.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def bytes_text(count: float) -> str:
    """`count` bytes for people: '512 B', '3.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return "%d B" % count if unit == "B" else "%.1f %s" % (count, unit)
        count /= 1024
    return "%.1f TiB" % count


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """Yield `report(step, done, total)`, which shows how far each step of a long job is."""
    if not sys.stderr.isatty():
        yield _plain_report()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    tasks: Dict[str, Any] = {}
    with Progress(
        *columns, console=Console(stderr=True, no_color=not _coloured(sys.stderr))
    ) as bar:

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield report


def _plain_report() -> Report:
    """A line at the end of each step; before it one every PLAIN_INTERVAL seconds, later rarer."""
    started: Dict[str, float] = {}
    printed: Dict[str, float] = {}

    def report(step: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun = started.setdefault(step, now)
        last = printed.setdefault(step, now)
        if done < total and now - last < max(PLAIN_INTERVAL, (now - begun) / 4):
            return
        printed[step] = now
        left = (
            ""
            if done >= total or not done
            else ", %.0f s left" % ((now - begun) / done * (total - done))
        )
        note("%s: %d/%d, %.1f s%s" % (step, done, total, now - begun, left))

    return report


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
