"""`jetson/entrypoint`: what the container runs. docs/board.md has it.

A command line of its own over `edgepool.board`: each job makes a session ready, says what it found
on stderr, and does what it is for.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, NoReturn, Optional, Sequence

import typer

from ..errors import BadInput, MissingRequirement
from . import console
from . import main as edgepool

if TYPE_CHECKING:
    from ..board.ready import Ready
    from ..board.wish import Wish
    from ..engine.line import Line

NAME = "edgepool-entrypoint"
JOBS = ("run", "build", "check", "bench", "serve")
BACKENDS = ("trt", "ort")
PRECISIONS = ("fp32", "fp16", "int8")

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 3 this machine lacks something.",
    context_settings={"max_content_width": console.WIDTH},
)
def command(
    job: str = typer.Argument(..., metavar="JOB", help="run, build, check, bench or serve."),
    bundle: Path = typer.Argument(
        Path("/models"), metavar="BUNDLE", help="A bundle, or a folder that holds one."
    ),
    backend: str = typer.Option("trt", help="trt, or ort: ONNX Runtime on the CPU, no GPU needed."),
    precision: Optional[str] = typer.Option(
        None, help="fp32, fp16 or int8; by default fp16 where the bundle has it, else fp32."
    ),
    context: Optional[int] = typer.Option(
        None, help="Tokens per sequence; by default the model's context."
    ),
    batch: int = typer.Option(1, help="Sequences at once (build, check, bench)."),
    adapt: bool = typer.Option(
        False, "--adapt", help="Where it does not fit: INT8, a shorter context, a smaller batch."
    ),
    threads: int = typer.Option(0, min=0, help="CPU threads (ort); 0: one per physical core."),
    prompt: Optional[str] = typer.Option(
        None, help="The text to continue; - reads it from stdin (run)."
    ),
    chat: bool = typer.Option(False, "--chat", help="Send it as a user's chat message (run)."),
    max_new_tokens: int = typer.Option(256, min=1, help="Stop after so many tokens (run)."),
    json: bool = console.JSON,
) -> None:
    """Take a bundle to text on this machine: look at it, build the engine, check it, do the JOB.

    \b
    Examples:
      edgepool-entrypoint check
      edgepool-entrypoint run --prompt "The capital of France is"
      edgepool-entrypoint bench --adapt --json
      edgepool-entrypoint run edgepool-bundle --backend ort --prompt "Once upon a time"
    """
    console.one_of("JOB", job, JOBS)
    console.one_of("--backend", backend, BACKENDS)
    console.one_of("--precision", precision, PRECISIONS)
    if job == "serve":
        raise MissingRequirement("`serve` comes with edgepool 0.2: `run` writes one text")
    if (job == "run") != (prompt is not None):
        raise BadInput("`run` needs --prompt" if job == "run" else "--prompt is for `run`")
    if job == "run" and batch != 1:
        raise BadInput("--batch %d: `run` writes one text" % batch)

    from ..board.wish import Wish

    wish = Wish(bundle, backend, precision, context, batch, adapt, threads)
    if job == "check":
        return check(wish, json)
    if job == "bench":
        return bench(wish, json)
    ready = _ready(wish, _note_line)
    with contextlib.closing(ready.session):
        if prompt is not None:
            run(ready, prompt, chat, max_new_tokens, json)
        elif json:
            console.print_json(ready.to_dict())
    return None


def check(wish: Wish, json: bool) -> None:
    """Every step, and a table of what was found, also where one failed."""
    found: List[Line] = []
    passed = False
    try:
        _ready(wish, found.append).session.close()
        passed = True
    finally:
        if json:
            console.print_json({"ok": passed, "lines": [dict(vars(line)) for line in found]})
        else:
            rows = [[line.name, line.state, line.found, line.fix] for line in found]
            console.print_table(["", "", "found", "do"], rows)


def run(ready: Ready, prompt: str, chat: bool, max_new_tokens: int, json: bool) -> None:
    """Generate text, as `edgepool run` does."""
    from ..runtime.generate import GREEDY, check_prompt
    from ..runtime.source import Source, tokenizer_of
    from .run_command import complete, encoded, prompt_text

    tokenizer = tokenizer_of(ready.bundle)
    source = Source(ready.bundle.config, tokenizer, lambda _: ready.session, ready.file)
    prompt_ids = encoded(source, prompt_text(prompt), chat)
    check_prompt(prompt_ids, ready.session.capacity)
    complete(ready.session, source, prompt_ids, GREEDY, max_new_tokens, stop=(), json=json)


def bench(wish: Wish, json: bool) -> None:
    """Prefill and decode at several lengths of the context, and memory.

    What the machine has less of than before is all of it on a board, the GPU's share too.
    """
    from ..board.bench import bench, peak_memory
    from ..engine.memory import available

    before = available()
    ready = _ready(wish, _note_line)
    with contextlib.closing(ready.session), console.progress() as report:
        speeds = bench(ready.session, report)
        taken = max(0, before - available())
        memory = {"cache": ready.session.cache_bytes, "machine": taken, "process": peak_memory()}
    if json:
        found = {"speeds": [dict(vars(speed)) for speed in speeds], "memory": memory}
        console.print_json({**ready.to_dict(), **found})
        return
    rows = [
        [
            speed.context,
            "%.1f" % speed.prefill_tokens_per_s,
            "%.1f" % speed.decode_tokens_per_s,
            "%.2f" % speed.decode_ms,
        ]
        for speed in speeds
    ]
    columns = ["context", "prefill tokens/s", "decode tokens/s", "ms per step"]
    console.print_table(columns, rows, title=str(ready.choice))
    for name, count in memory.items():
        console.note("%s: %s" % (name, console.bytes_text(count)))


def _ready(wish: Wish, tell: Callable[[Line], None]) -> Ready:
    from ..board.ready import make_ready

    with console.progress() as report:
        return make_ready(wish, report, tell)


def _note_line(line: Line) -> None:
    """A line of the log: what the machine is, what it lacks or could do better, each step."""
    from ..board.ready import MACHINE, STEPS
    from ..engine.line import OK

    if line.name in (*MACHINE, *STEPS) or line.state != OK or line.fix:
        hint = " (%s)" % line.fix if line.fix else ""
        console.note("%s: %s%s" % (line.name, line.found, hint))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return its exit code; SIGTERM, how containers end, ends it well."""
    signal.signal(signal.SIGTERM, _end)
    return edgepool.run(app, NAME, argv)


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
