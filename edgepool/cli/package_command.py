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
        metavar="BUNDLE",
        help="The bundle, edgepool-bundle by default; with --extract, the folder to make.",
    ),
    target: Optional[str] = typer.Option(None, help="The Jetson that the package is for."),
    output: Optional[Path] = typer.Option(
        None, "--output", "-o", help="The file to write; TARGET.tar by default."
    ),
    plugin_library: Optional[Path] = typer.Option(
        None, help="A plugin library compiled for the board, for the image build."
    ),
    triton: Optional[Path] = typer.Option(
        None, metavar="DIR", help="Write a Triton model repository into a new folder instead."
    ),
    max_kv_tokens: Optional[int] = typer.Option(
        None, help="Tokens in the pools of a sequence (with --triton); by default the context."
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
    the container's files: unpacked, it is what `docker build` takes. With --triton, write a model
    repository for Triton Inference Server, for its ONNX Runtime or a target's TensorRT.

    \b
    Examples:
      edgepool package --target jetson-agx-orin -o orin.tar
      edgepool package --verify orin.tar
      edgepool package --extract orin.tar orin
      edgepool package --triton models
    """
    jobs = [job for job in (triton, verify, extract) if job is not None]
    if len(jobs) > 1 or (not jobs and target is None):
        raise BadInput("package: choose one of --target, --triton, --verify and --extract")
    if jobs and (output, plugin_library) != (None, None):
        raise BadInput("--output and --plugin-library belong to --target alone")
    if triton is None and max_kv_tokens is not None:
        raise BadInput("--max-kv-tokens belongs to --triton")
    if (verify or extract) and target is not None:
        raise BadInput("--target %s: a package says itself what it is for" % target)
    bundle = path or Path("edgepool-bundle")
    if triton is not None:
        _triton(bundle, triton, target, max_kv_tokens, json)
    elif verify is not None:
        if path is not None:
            raise BadInput("%s: --verify takes the file and nothing else" % path)
        _verify(verify, json)
    elif extract is not None:
        _extract(extract, path or extract.with_suffix(""), json)
    elif target is not None:
        _write(bundle, target, output, plugin_library, json)


def _write(
    bundle: Path, name: str, output: Optional[Path], library: Optional[Path], json: bool
) -> None:
    from ..bundle import Bundle
    from ..package.contents import package
    from ..targets import find_target

    target = find_target(name)
    output = output or Path("%s.tar" % name)
    source = Bundle.open(bundle)
    with console.progress() as report:
        listing = package(source, target, output, library, report, console.note)
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
    if target.recommended_precision == "int8" and not any(
        "int8" in m.name for m in listing.members
    ):
        way = "`edgepool quantize` makes one"
        if source.manifest["dtype"] == "fp16":
            way = "INT8 is made from an FP32 bundle (`edgepool export --dtype fp32`)"
        console.note("note: no INT8 graph in it: %s" % way)
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


def _triton(
    bundle: Path, folder: Path, name: Optional[str], kv_tokens: Optional[int], json: bool
) -> None:
    from ..bundle import Bundle
    from ..package.triton import write_repository
    from ..targets import find_target

    target = None if name is None else find_target(name)
    with console.progress() as report:
        written = write_repository(Bundle.open(bundle), folder, target, kv_tokens, report)
    model = written.model
    if json:
        record = {
            "repository": str(folder),
            "platform": model.platform,
            "precision": model.precision,
            "complete": model.file is not None,
            "kv_tokens": model.kv_tokens,
            "state_bytes": written.state_bytes,
        }
        console.print_json(record)
        return
    console.note(
        "wrote %s (%s): a sequence takes %s for %d tokens"
        % (folder, model.platform, console.bytes_text(written.state_bytes), model.kv_tokens)
    )
    if model.file is None:
        console.note(
            "note: you have built no engine for it here: %s says how to, and where to put it"
            % (folder / "README.md")
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
