"""`edgepool build-engine`: a TensorRT engine from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from ..errors import BadInput
from . import console


def command(
    bundle: Path = typer.Argument(Path("edgepool-bundle"), help="What `edgepool export` wrote."),
    int8: bool = typer.Option(False, "--int8", help="INT8 weights and activations."),
    fp16: bool = typer.Option(False, "--fp16", help="FP16 weights and activations."),
    target: Optional[str] = typer.Option(
        None, help="The device it is to run on (see `edgepool targets`); by default this machine."
    ),
    runtime: str = typer.Option(
        "auto", help="tensorrt (needs the target's GPU), rtx (needs no GPU), or auto."
    ),
    max_batch_size: int = typer.Option(1, help="Sequences in one step."),
    max_input_len: int = typer.Option(512, help="New tokens per sequence in one step of prefill."),
    max_kv_tokens: Optional[int] = typer.Option(
        None, help="Tokens in the KV pool, of all sequences together; by default the context."
    ),
    workspace: Optional[float] = typer.Option(
        None, help="GiB that TensorRT may take while it builds and runs."
    ),
    timing_cache: Optional[Path] = typer.Option(
        None, help="A file that keeps measured kernel times; a second build is faster."
    ),
    force: bool = typer.Option(False, "--force", help="Build even if the engine is there."),
    json: bool = console.JSON,
) -> None:
    """Build a TensorRT engine.

    With a GPU here it is built for that GPU, by TensorRT with edgepool's plugins. Without one it is
    built ahead of time by TensorRT-RTX, which runs the portable graph and no plugins. An engine for
    a Jetson is built on the board; here its graph is made and checked, and exit 3 says what to type
    there. Calibrates and quantizes first, with the defaults, where that is not done.

    \b
    Examples:
      edgepool build-engine
      edgepool build-engine --int8 --max-kv-tokens 32768
      edgepool build-engine --target rtx-4090
      edgepool build-engine --int8 --target jetson-agx-xavier
    """
    from ..bundle import Bundle
    from ..engine.build import Options, build_engine

    if int8 and fp16:
        raise BadInput("--int8 and --fp16: choose one")
    if workspace is not None and not 0 < workspace < 1024:
        raise BadInput("--workspace %g: GiB, more than 0" % workspace)
    options = Options(
        precision="int8" if int8 else "fp16" if fp16 else None,
        target=target,
        runtime=runtime,
        batch=max_batch_size,
        input_len=max_input_len,
        kv_tokens=max_kv_tokens,
        workspace=None if workspace is None else int(workspace * (1 << 30)),
        timing_cache=timing_cache,
        force=force,
    )
    with console.progress() as report:
        built = build_engine(Bundle.open(bundle), options, report, console.note)
    record = built.record
    if json:
        console.print_json({"engine": str(built.path), "reused": built.reused, **record})
        return
    console.note(
        "%s: %s, built by %s" % (record["form"], record["key"]["precision"], record["runtime"])
    )
    if record["bytes_copied_per_step"]:
        console.note(
            "the KV pools are double-buffered: %s are copied in each step"
            % console.bytes_text(record["bytes_copied_per_step"])
        )
    done = "is up to date" if built.reused else "written"
    console.note("%s %s (%s)" % (built.path, done, console.bytes_text(record["bytes"])))
