"""`edgepool inspect`: what is in a bundle, a model.pt, an ONNX file or a plugin library."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

import typer

from ..config import ModelConfig
from ..errors import BadInput
from . import console


def command(
    path: Path = typer.Argument(
        Path("edgepool-bundle"),
        metavar="PATH",
        help="A bundle folder, a model.pt, an ONNX file or a plugin library.",
    ),
    json: bool = console.JSON,
) -> None:
    """Show what a bundle, a model.pt, an ONNX file or a library of edgepool's plugins holds.

    Of a model also what a context costs in memory.

    \b
    Examples:
      edgepool inspect
      edgepool inspect model.pt
      edgepool inspect edgepool-bundle/model.onnx --json
      edgepool inspect libedgepool_plugins.so
    """
    if path.is_dir():
        record = _bundle(path)
    elif not path.exists():
        raise BadInput("%s: no such file or folder" % path)
    elif path.suffix == ".onnx":
        record = {"kind": "ONNX file", "graphs": {path.name: _graph(path)}}
    elif path.suffix == ".so":
        record = _plugins(path)
    else:
        record = _checkpoint(path)
    if json:
        console.print_json(record)
    else:
        _print(record)


def _bundle(path: Path) -> Dict[str, Any]:
    from ..bundle import Bundle

    bundle = Bundle.open(path)
    manifest = bundle.manifest
    graphs = [name for name in manifest["files"] if name.endswith(".onnx")]
    keys = ("edgepool", "dtype", "opset", "variants", "quantization", "parity", "files")
    return {
        "kind": "bundle",
        **{key: manifest[key] for key in keys},
        "graphs": {name: _graph(bundle.file(name)) for name in graphs},
        "config": bundle.config.to_dict(),  # the manifest may leave out what has a default
        "cache": _cache(bundle.config, manifest["dtype"]),
    }


def _checkpoint(path: Path) -> Dict[str, Any]:
    from ..checkpoint import load

    checkpoint = load(path, check_values=False)
    tensors = checkpoint.weights.values()
    stored = Counter(str(x.dtype).replace("torch.", "") for x in tensors)
    return {
        "kind": "model.pt",
        "parameters": sum(x.numel() for x in tensors),
        "bytes": sum(x.numel() * x.element_size() for x in tensors),
        "stored": dict(stored),
        "tokenizer": checkpoint.tokenizer is not None,
        "dtype": "fp32",
        "config": checkpoint.config.to_dict(),
        "cache": _cache(checkpoint.config, "fp32"),
    }


def _plugins(path: Path) -> Dict[str, Any]:
    from ..plugin_library import build_record

    return {"kind": "plugin library", "bytes": path.stat().st_size, **build_record(path)}


def _graph(path: Path) -> Dict[str, Any]:
    from ..onnxfile import summary

    return {"bytes": path.stat().st_size, **dataclasses.asdict(summary(str(path)))}


def _cache(config: ModelConfig, dtype: str) -> List[Dict[str, int]]:
    from ..inspection import cache_costs

    return [
        {**dataclasses.asdict(cost), "total": cost.total} for cost in cache_costs(config, dtype)
    ]


# ------------------------------------------------------------------------------------- text


def _print(record: Dict[str, Any]) -> None:
    rows: List[List[object]] = [["kind", record["kind"]]]
    if "interface" in record:
        rows += _plugin_rows(record)
    rows += [[key, record[key]] for key in ("edgepool", "dtype", "parameters") if key in record]
    if "stored" in record:
        rows.append(["stored", ", ".join("%s in %d tensors" % x for x in record["stored"].items())])
        rows.append(["bytes", console.bytes_text(record["bytes"])])
    if "config" in record:
        rows += _config_rows(record["config"])
    for name, parity in (record.get("parity") or {}).items():
        rows.append(["parity", "%s: logits within %g" % (name, parity["max_logit_difference"])])
    console.print_table(["", ""], rows)
    if "files" in record:
        print()
        files = [[name, console.bytes_text(f["bytes"])] for name, f in record["files"].items()]
        console.print_table(["file", "size"], files)
    for name, graph in record.get("graphs", {}).items():
        print()
        console.print_table([name, ""], _graph_rows(graph))
    if "cache" in record:
        print()
        _print_cache(record["cache"], record["dtype"])


def _plugin_rows(record: Dict[str, Any]) -> List[List[object]]:
    code = ["sm_%s" % sm for sm in record["sm"]] + ["PTX for %s" % sm for sm in record["ptx"]]
    runs = "this CPU's emulation" if record["emulated"] else ", ".join(code)
    return [
        ["edgepool", "%s, %s" % (record["version"], record["commit"] or "commit not recorded")],
        ["size", console.bytes_text(record["bytes"])],
        ["operators", ", ".join(record["operators"])],
        ["runs on", "%s, %s" % (runs, record["machine"])],
        ["CUDA", record["cuda"] or "none"],
        ["TensorRT", "%s, %s" % (record["tensorrt"], record["interface"])],
    ]


def _config_rows(config: Dict[str, Any]) -> List[List[object]]:
    kinds = Counter(config["layer_types"])
    readers = sum(donor != i for i, donor in enumerate(config["kv_donor"]))
    shape = "%d wide, %d heads (%d for keys and values) of %d, feed-forward %d"
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    rows: List[List[object]] = [
        ["layers", ", ".join("%d %s" % (n, kind) for kind, n in kinds.items())],
        ["shape", shape % tuple(config[key] for key in sizes)],
        ["vocabulary", config["vocab_size"]],
        ["context", config["max_context"]],
        ["pages", "%d tokens, %s" % (config["page_size"], config["kv_dtype"])],
    ]
    if readers:
        rows.append(["readers", "%d layers read another layer's pages" % readers])
    if kinds["sparse"] or kinds["keypoints"]:
        index = config["index"]
        text = "%d tokens selected in blocks of %d, pools of %d, sinks %d, window %d"
        block = index["block"] * index["ratio"]
        span = (config["sinks"], config["window"])
        rows.append(["selection", text % (index["top_k"], block, index["ratio"], *span)])
    return rows


def _graph_rows(graph: Dict[str, Any]) -> List[List[object]]:
    opsets = ("%s %d" % (domain or "onnx", n) for domain, n in graph["opsets"].items())
    functions = graph["functions"]
    operators = ("%s %d" % item for item in graph["operators"].items())
    return [
        ["size", console.bytes_text(graph["bytes"])],
        ["opset", "%s; IR %d" % (", ".join(opsets), graph["ir_version"])],
        ["functions", ", ".join(functions) or "none"],
        ["weights", "%d initialisers%s" % (graph["initializers"], _where(graph["external"]))],
        ["inputs", _shortened(graph["inputs"])],
        ["outputs", _shortened(graph["outputs"])],
        ["operators", ", ".join(operators)],
    ]


def _where(external: List[str]) -> str:
    return " in %s" % ", ".join(external) if external else ""


def _shortened(names: List[str]) -> str:
    return (
        ", ".join(names) if len(names) <= 9 else "%s, ... (%d)" % (", ".join(names[:9]), len(names))
    )


def _print_cache(costs: List[Dict[str, int]], dtype: str) -> None:
    rows = [
        [
            "%dK" % (c["context"] >> 10) if c["context"] < 1 << 20 else "1M",
            console.bytes_text(c["kv"]),
            console.bytes_text(c["index"]),
            console.bytes_text(c["total"]),
            console.bytes_text(c["dense_fp16"]),
            "%.2f" % (c["total"] / c["dense_fp16"]),
            c["attended"],
        ]
        for c in costs
    ]
    columns = ["context", "KV", "index", "cache", "dense FP16", "ratio", "tokens attended"]
    console.print_table(columns, rows, title="cache of one sequence (%s graph)" % dtype)
