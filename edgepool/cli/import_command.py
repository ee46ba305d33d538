"""`edgepool import`: a Hugging Face folder or a GGUF file becomes a model.pt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from . import console


def command(
    source: Path = typer.Argument(..., metavar="SRC", help="GGUF file or Hugging Face folder."),
    output: Path = typer.Option(Path("model.pt"), "--output", "-o", help="File to write."),
    attention: str = typer.Option("sparse", help="sparse (a fixed token budget) or full."),
    budget: int = typer.Option(1024, help="Tokens that a query attends to."),
    window: int = typer.Option(128, help="Latest tokens, always attended."),
    sinks: int = typer.Option(16, help="First tokens, always attended."),
    page_size: int = typer.Option(16, help="Tokens per KV page, a multiple of the ratio."),
    ratio: int = typer.Option(4, help="Keys per pooled index vector."),
    kv_dtype: str = typer.Option("fp16", help="Storage of KV pages and index: fp16 or int8."),
    json: bool = console.JSON,
) -> None:
    """Turn a trained model into a model.pt that attends to a fixed number of tokens.

    Llama, Qwen2, Qwen3 and SmolLM3 models. Weights keep their precision (quantised GGUF kinds
    become float16); tokenizer and chat template come along.

    \b
    Examples:
      edgepool import SmolLM2-135M-Instruct.Q4_1.gguf -o model.pt
      edgepool import ./Qwen2.5-1.5B-Instruct --budget 2048 --kv-dtype int8
      edgepool import ./Llama-3.2-1B --attention full -o dense.pt
    """
    from ..checkpoint import Retrofit, import_checkpoint

    retrofit = Retrofit(attention, budget, window, sinks, page_size, ratio, kv_dtype)
    with console.progress() as report:
        summary = import_checkpoint(source, output, retrofit, report)
    if json:
        record = dataclasses.asdict(summary)
        record["config"] = summary.config.to_dict()
        console.print_json(record)
        return
    config = summary.config
    attended = config.attended_tokens(0, config.max_context)
    stored = ["%s %s" % (name, console.bytes_text(n)) for name, n in summary.stored.items()]
    rows = [
        ("written", "%s, %s" % (summary.path, console.bytes_text(summary.bytes))),
        ("family", summary.family),
        ("parameters", "%.1f M" % (summary.parameters / 1e6)),
        ("layers", "%d, %s" % (config.num_layers, attention)),
        ("attended", "at most %d of %d tokens" % (attended, config.max_context)),
        ("weights", ", ".join(stored)),
        ("KV storage", config.kv_dtype),
        ("tokenizer", "none" if summary.tokens is None else "%d tokens" % summary.tokens),
        ("chat template", "none" if config.chat_template is None else "yes"),
        ("time", "%.1f s" % summary.seconds),
    ]
    console.print_table(["model", ""], rows)
