"""`edgepool run`: a prompt in, text out."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ContextManager, Dict, List, Optional, Sequence

import typer

from ..errors import BadInput
from . import console

if TYPE_CHECKING:
    from ..progress import Report
    from ..runtime.generate import Completion
    from ..runtime.sampling import Sampling
    from ..runtime.session import Session
    from ..runtime.source import Source


def command(
    bundle: Path = typer.Argument(
        Path("edgepool-bundle"),
        metavar="BUNDLE",
        help="A bundle folder, or a model.pt (PyTorch).",
    ),
    prompt: str = typer.Option(..., help="The text to continue; - reads it from stdin."),
    chat: bool = typer.Option(False, "--chat", help="Send the prompt as a user's chat message."),
    system: Optional[str] = typer.Option(None, help="The system message before it (with --chat)."),
    max_new_tokens: int = typer.Option(256, min=1, help="Stop after so many tokens."),
    backend: Optional[str] = typer.Option(
        None, help="ort, torch, or trt for an engine; by default what the file is made for."
    ),
    trust_engine: bool = typer.Option(
        False, "--trust-engine", help="Run an engine that you did not build yourself (trt)."
    ),
    device: str = typer.Option("cpu", help="cpu or cuda (ort)."),
    int8: bool = typer.Option(False, "--int8", help="Run the bundle's model.int8.onnx (ort)."),
    temperature: float = typer.Option(0.0, min=0, help="0 takes the most likely token."),
    top_k: int = typer.Option(0, min=0, help="Sample from the k most likely tokens; 0: all."),
    top_p: float = typer.Option(1.0, help="Sample from the most likely tokens of this sum."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1 avoids tokens that occurred."),
    seed: Optional[int] = typer.Option(None, min=0, help="The same seed gives the same text."),
    stop: Optional[List[str]] = typer.Option(None, help="End before this text; can be repeated."),
    threads: int = typer.Option(0, min=0, help="CPU threads; 0: one per physical core."),
    json: bool = console.JSON,
) -> None:
    """Generate text from a prompt. Text goes to stdout as it comes, the figures to stderr.

    \b
    Examples:
      edgepool run --prompt "The capital of France is" --max-new-tokens 32
      edgepool run --chat --prompt "Why is the sky blue?" --temperature 0.7 --seed 1
      edgepool run --int8 --prompt "The capital of France is"
      edgepool run model.pt --prompt - < story.txt
    """
    from ..runtime.generate import check_prompt
    from ..runtime.sampling import Sampling
    from ..runtime.source import open_source

    console.one_of("--backend", backend, ("ort", "torch", "trt"))
    console.one_of("--device", device, ("cpu", "cuda"))
    if system is not None and not chat:
        raise BadInput("--system needs --chat")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    text = prompt_text(prompt)
    source = open_source(bundle, backend, threads, device, trust_engine, int8)
    prompt_ids = encoded(source, text, chat, system)
    check_prompt(prompt_ids, source.config.max_context)
    capacity = min(source.config.max_context, len(prompt_ids) + max_new_tokens)
    with contextlib.closing(source.open_session(capacity)) as session:
        complete(session, source, prompt_ids, sampling, max_new_tokens, stop or (), json)


def encoded(source: Source, text: str, chat: bool, system: Optional[str] = None) -> List[int]:
    """The tokens of a prompt, as text or as a user's message."""
    if not chat:
        return source.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return source.encode_chat([*messages, {"role": "user", "content": text}])


def complete(
    session: Session,
    source: Source,
    prompt_ids: List[int],
    sampling: Sampling,
    max_new_tokens: int,
    stop: Sequence[str],
    json: bool,
) -> None:
    """Generate, and print the text as it comes and the figures, or all of it as JSON."""
    from ..runtime.generate import generate

    with _prefill_progress(len(prompt_ids), session.chunk) as report:
        run = generate(
            session,
            source.tokenizer,
            prompt_ids,
            sampling,
            max_new_tokens,
            stop,
            on_text=None if json else _print_piece,
            report=report,
        )
    if json:
        console.print_json(_record(run, source.file, session.cache_bytes))
        return
    print(flush=True)
    _note_figures(run, source.file, session.cache_bytes)


def prompt_text(prompt: str) -> str:
    """The prompt; from stdin without the line end that shells and editors put last."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput("stdin: not UTF-8 text (byte %d)" % error.start) from error
        if prompt.endswith("\n"):
            prompt = prompt[:-1]
    if not prompt:
        raise BadInput("the prompt is empty: give it some text")
    return prompt


def _prefill_progress(tokens: int, chunk: int) -> ContextManager[Optional[Report]]:
    """Progress for a prompt that takes several steps; a short one is read at once."""
    return console.progress() if tokens > chunk else contextlib.nullcontext()


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _record(run: Completion, file: str, cache_bytes: int) -> Dict[str, Any]:
    return {
        "ran": file,
        "text": run.text,
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": len(run.token_ids),
        "prefill_tokens_per_s": run.prefill_tokens_per_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "cache_bytes": cache_bytes,
        "attended_fraction": run.attended_fraction,
    }


def _note_figures(run: Completion, file: str, cache_bytes: int) -> None:
    decode = run.decode_tokens_per_s
    console.note(
        "%s: prompt %d tokens, %.1f per second; completion %d tokens%s; cache %s; %.1f %% attended"
        % (
            file,
            run.prompt_tokens,
            run.prefill_tokens_per_s,
            len(run.token_ids),
            "" if decode is None else ", %.1f per second" % decode,
            console.bytes_text(cache_bytes),
            100 * run.attended_fraction,
        )
    )
