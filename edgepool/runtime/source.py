"""What `edgepool run` runs: a bundle (ONNX Runtime) or a `model.pt` (PyTorch), by its path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional

from ..bundle import GRAPHS, MODEL, Bundle
from ..config import ModelConfig
from ..errors import BadInput
from . import chat
from .session import Session
from .tokenizer import Tokenizer


@dataclass
class Source:
    """A model that is ready to be run.

    open_session(capacity) loads it for one sequence of that many tokens; file: what is run, by its
    name in the bundle.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    open_session: Callable[[int], Session]
    file: str

    def encode(self, prompt: str) -> List[int]:
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: List[Dict[str, str]]) -> List[int]:
        """Token ids of a conversation, laid out by the model's chat template."""
        c = self.config
        if c.chat_template is None:
            raise BadInput("the model has no chat template: run it without --chat")
        text = chat.render(
            c.chat_template,
            messages,
            bos_token=self.tokenizer.token(c.bos_token_id),
            eos_token=self.tokenizer.token(c.eos_token_ids[0] if c.eos_token_ids else None),
        )
        return self.tokenizer.encode(text, special_tokens=False)  # the template wrote them


def open_source(
    path: Path,
    backend: Optional[str] = None,
    threads: int = 0,
    device: str = "cpu",
    trust_engine: bool = False,
    int8: bool = False,
) -> Source:
    """Open a bundle folder or a `model.pt`; nothing heavy is loaded before `open_session`.

    backend  `ort`, `torch`, `trt`, or None for what the path calls for. With `torch`, a bundle
             stands for the `model.pt` beside it that it was exported from.
    trust_engine  with `trt`, also load an engine that was not built by this user
    int8     the bundle's model.int8.onnx in place of model.onnx, with ONNX Runtime
    Raises BadInput for a path that is neither, and for a bundle whose files are not those that were
    exported: their sha256 is checked every time, which costs about as much as reading them.
    """
    if int8 and (backend in ("torch", "trt") or path.suffix == ".pt"):
        raise BadInput(
            "--int8: ONNX Runtime runs a bundle's %s: name a bundle, without --backend (trt takes "
            "the fastest engine that there is)" % GRAPHS["int8"]
        )
    if path.suffix == ".pt" or path.is_file():
        if backend in ("ort", "trt"):
            name = "ONNX Runtime" if backend == "ort" else "TensorRT"
            raise BadInput("%s: %s runs a bundle: `edgepool export` it first" % (path, name))
        return _checkpoint_source(path, threads)
    bundle = Bundle.open(path)
    if backend == "trt":
        return _engine_source(bundle, trust_engine)
    if backend != "torch":
        return _bundle_source(bundle, threads, device, int8)
    exported_from = path.parent / "model.pt"
    if not exported_from.exists():
        raise BadInput(
            "%s: PyTorch needs the model.pt that it was exported from: name that file instead"
            % path
        )
    return _checkpoint_source(exported_from, threads, bundle)


def _bundle_source(bundle: Bundle, threads: int, device: str, int8: bool) -> Source:
    from . import ort_session

    name = GRAPHS["int8"] if int8 else MODEL
    if name not in bundle.manifest["files"]:
        raise BadInput("%s: it has no %s: `edgepool quantize` makes one" % (bundle.path, name))
    graph, config = bundle.file(name), bundle.config_of("int8") if int8 else bundle.config
    _verify_used(bundle, name)
    return Source(
        config,
        tokenizer_of(bundle),
        lambda capacity: ort_session.open_session(
            graph, config, capacity=capacity, threads=threads, device=device
        ),
        name,
    )


def _engine_source(bundle: Bundle, trust_engine: bool) -> Source:
    from ..engine.usable import find_usable
    from . import device_memory, trt_session

    _verify_used(bundle, MODEL)
    usable = find_usable(bundle, trust_engine)
    trt, in_place = usable.api.trt, bool(usable.record["in_place"])
    config = bundle.config_of(str(usable.record["key"]["precision"]))

    def open_session(capacity: int) -> Session:
        device = device_memory.open_device()
        return trt_session.open_session(usable.engine, trt, device, config, in_place, capacity)

    return Source(config, tokenizer_of(bundle), open_session, usable.name)


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    """The tokenizer of a bundle; raises BadInput where it has none."""
    if bundle.tokenizer_path is None:
        raise BadInput("%s: it has no tokenizer.json: export with one" % bundle.path)
    text = bundle.tokenizer_path.read_text(encoding="utf-8")
    return Tokenizer(text, bundle.config, str(bundle.tokenizer_path))


def _verify_used(bundle: Bundle, graph: str) -> None:
    """Compare the sha256 of what this run reads: not of the graphs for other targets."""
    names = {*bundle.graph_files(graph), "tokenizer.json"}
    used = {name: r for name, r in bundle.manifest["files"].items() if name in names}
    Bundle(bundle.path, {**bundle.manifest, "files": used}, bundle.config).verify()


def _checkpoint_source(path: Path, threads: int, bundle: Optional[Bundle] = None) -> Source:
    """A `model.pt`; with a bundle, what that was exported from, within the bundle's context."""
    from ..checkpoint import load
    from . import torch_session

    checkpoint = load(path)
    if bundle is not None:
        if checkpoint.source != bundle.manifest["source_digest"]:
            raise BadInput("%s: not the model that the bundle was exported from" % path)
        context = min(checkpoint.config.max_context, bundle.config.max_context)
        config = dataclasses.replace(checkpoint.config, max_context=context)
        checkpoint = dataclasses.replace(checkpoint, config=config)
    if checkpoint.tokenizer is None:
        raise BadInput("%s: it has no tokenizer: import the model with one" % path)
    return Source(
        checkpoint.config,
        Tokenizer(checkpoint.tokenizer, checkpoint.config, str(path)),
        lambda capacity: torch_session.open_session(checkpoint, capacity=capacity, threads=threads),
        path.name,
    )
