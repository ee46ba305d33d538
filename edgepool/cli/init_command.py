"""`edgepool init`: a model.pt with random weights."""

from __future__ import annotations

from pathlib import Path

import typer

from ..config import suggest
from ..errors import BadInput
from . import console


def command(
    preset: str = typer.Argument(..., metavar="PRESET", help="edgepool-tiny or edgepool-12l."),
    output: Path = typer.Option(Path("model.pt"), "--output", "-o", help="File to write."),
    seed: int = typer.Option(0, help="The same seed gives the same file."),
    json: bool = console.JSON,
) -> None:
    """Write a model of the edgepool architecture with random weights, to be trained.

    It comes with a byte-level tokenizer, so that it can be exported and run at once.

    \b
    Examples:
      edgepool init edgepool-tiny -o tiny.pt
      edgepool init edgepool-12l --seed 7
    """
    from ..checkpoint import byte_tokenizer, random_weights, save
    from ..model.presets import PRESETS

    if preset not in PRESETS:
        raise BadInput(
            "unknown preset %r%s; there are %s"
            % (preset, suggest(preset, PRESETS), " and ".join(PRESETS))
        )
    config = PRESETS[preset]
    weights = random_weights(config, seed)
    with console.progress() as report:
        save(output, config, weights, byte_tokenizer(), report=report)
    size = output.stat().st_size
    if json:
        console.print_json({"path": str(output), "preset": preset, "seed": seed, "bytes": size})
    else:
        console.note("wrote %s (%s, %s)" % (output, preset, console.bytes_text(size)))
