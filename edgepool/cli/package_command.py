"""`edgepool package`: one file with all that a board needs; check it and unpack it there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional

import typer

from ..errors import BadInput
from . import console

if TYPE_CHECKING:
    from ..package.listing import Listing


def command(
    path: Optional[Path] = typer.Argument(
        None,
        metavar="[BUNDLE]",
        help="The bundle, edgepool-bundle by default; with --extract, the folder to make.",
    ),
    target: Optional[str] = typer.Option(None, help="The Jetson that the package is for."),
    output: Optional[Path] = typer.Option(
        None, "--output", "-o", help="The file to write; TARGET.tar by default."
    ),
    plugin_library: Optional[Path] = typer.Option(
        None, help="A plugin library compiled for the board, for the image build."
    ),
    verify: Optional[Path] = typer.Option(
        None, metavar="FILE.tar", help="Say whether a package is intact."
    ),
    extract: Optional[Path] = typer.Option(
        None, metavar="FILE.tar", help="Check a package and unpack it into a new folder."
    ),
    json: bool = console.JSON,
) -> None:
    """Write all that a board needs into one file, or check or unpack such a file.

    The package holds the bundle for one target, the edgepool wheel with the plugins' sources, and
    the container's files: unpacked, it is what `docker build` takes.

    \b
    Examples:
      edgepool package --target jetson-agx-orin -o orin.tar
      edgepool package --verify orin.tar
      edgepool package --extract orin.tar orin
    """
    asked = {
        "--target": target,
        "--verify": verify,
        "--extract": extract,
    }
    given = [option for option, value in asked.items() if value is not None]
    if len(given) != 1:
        raise BadInput("package: choose one of --target, --verify and --extract")
    if target is None and (output, plugin_library) != (None, None):
        raise BadInput("--output and --plugin-library need --target")
    if target is not None:
        _write(path or Path("edgepool-bundle"), target, output, plugin_library, json)
    elif verify is not None:
        if path is not None:
            raise BadInput("%s: --verify takes the file and nothing else" % path)
        _verify(verify, json)
    elif extract is not None:
        _extract(extract, path or extract.with_suffix(""), json)


def _write(
    bundle: Path, name: str, output: Optional[Path], library: Optional[Path], json: bool
) -> None:
    from ..bundle import Bundle
    from ..package.contents import package
    from ..targets import find_target

    target = find_target(name)
    output = output or Path("%s.tar" % name)
    with console.progress() as report:
        listing = package(Bundle.open(bundle), target, output, library, report)
    record = _record(output, listing)
    if json:
        console.print_json(record)
        return
    total = record["bytes"]
    rows = [
        [
            part["part"],
            part["files"],
            console.bytes_text(part["bytes"]),
            "%.1f %%" % (100 * part["bytes"] / total),
        ]
        for part in record["parts"]
    ]
    rows.append(["the whole package", len(listing.members), console.bytes_text(total), "100.0 %"])
    console.print_table(["part", "files", "size", "share"], rows)
    console.note("wrote %s; on the board it takes as much again when it is extracted" % output)


def _verify(package: Path, json: bool) -> None:
    from ..package.read import verify

    with console.progress() as report:
        listing = verify(package, report)
    if json:
        console.print_json({**_record(package, listing), "intact": True})
        return
    print("intact")
    console.note(
        "%s: %d files for %s, %s; intact says that the copy is whole, not where it comes from"
        % (
            package,
            len(listing.members),
            listing.target,
            console.bytes_text(listing.total_bytes),
        )
    )


def _extract(package: Path, folder: Path, json: bool) -> None:
    from ..package.extract import extract

    with console.progress() as report:
        listing = extract(package, folder, report)
    if json:
        console.print_json({**_record(package, listing), "folder": str(folder)})
        return
    console.note(
        "wrote %s (%s), intact, for %s: try `edgepool run %s --prompt Hello`"
        % (
            folder,
            console.bytes_text(listing.content_bytes),
            listing.target,
            shlex.quote(str(folder / "bundle")),
        )
    )


def _record(package: Path, listing: Listing) -> Dict[str, Any]:
    from ..package.contents import parts

    return {
        "package": str(package),
        "bytes": listing.total_bytes,
        "target": listing.target,
        "edgepool": listing.edgepool,
        "source_digest": listing.source_digest,
        "parts": [
            {"part": part, "files": count, "bytes": size} for part, count, size in parts(listing)
        ],
    }
