"""`edgepool import`: a GGUF file or a Hugging Face folder becomes a `model.pt`."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from ..config import ModelConfig
from ..errors import BadInput
from ..progress import Report, silent
from .gguf_file import MAGIC
from .gguf_import import open_gguf
from .hf_import import open_folder
from .model_pt import save, tokenizer_size
from .retrofit import Retrofit
from .source import Source
from .weights import DTYPES


@dataclass(frozen=True)
class Summary:
    """What `import_checkpoint` wrote. `stored` counts weight bytes by dtype."""

    path: str
    family: str
    config: ModelConfig
    parameters: int
    stored: dict[str, int]
    tokens: Optional[int]
    bytes: int
    seconds: float


def import_checkpoint(
    source: Union[str, Path],
    target: Union[str, Path],
    retrofit: Retrofit = Retrofit(),  # noqa: B008 (frozen)
    report: Report = silent,
) -> Summary:
    """Write `target` (a model.pt) from a GGUF file or a Hugging Face folder.

    Weights keep their dtype, quantised ones become float16; memory stays near the largest tensor.
    Raises BadInput for a source that edgepool cannot express or that `target` is part of, and
    writes nothing then.
    """
    started = time.monotonic()
    source, target = Path(source), Path(target)
    retrofit.settings(1)  # a wrong option is reported before a large file is read
    found = open_source(source)
    _check_target(source, target)
    fields = dict(found.fields)
    config = ModelConfig(**fields, **retrofit.settings(fields["num_layers"]))
    save(target, config, found.weights, found.tokenizer, origin=found.path, report=report)
    stored: Counter[str] = Counter()
    for weight in found.weights.values():
        stored[DTYPES[weight.dtype]] += math.prod(weight.shape) * weight.dtype.itemsize
    text = found.tokenizer
    return Summary(
        path=str(target),
        family=found.family,
        config=config,
        parameters=sum(math.prod(weight.shape) for weight in found.weights.values()),
        stored=dict(stored),
        tokens=None if text is None else tokenizer_size(found.path, text),
        bytes=target.stat().st_size,
        seconds=time.monotonic() - started,
    )


def _check_target(source: Path, target: Path) -> None:
    """Refuse to write over the source: the file itself, or anything but a .pt in its folder."""
    files = [source]
    if source.is_dir():
        files += [file for file in source.iterdir() if file.is_file() and file.suffix != ".pt"]
        inside = target.parent.exists() and target.parent.samefile(source)
        if inside and target.suffix != ".pt":
            raise BadInput(f"{target}: in the folder of the source only a .pt file is written")
    if target.exists() and any(target.samefile(file) for file in files):
        raise BadInput(f"{target}: is the source; name another file to write")


def open_source(path: Path) -> Source:
    """Recognise a GGUF file or a Hugging Face folder by what it holds."""
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder")
    with path.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start != MAGIC:
        raise BadInput(f"{path}: neither a GGUF file nor a folder with config.json and safetensors")
    return open_gguf(path)
