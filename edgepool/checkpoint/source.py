"""What an importer hands over: configuration fields, weights by our names, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..config import ModelConfig, weight_shapes
from ..errors import BadInput
from .weights import LazyTensor, check_names, check_shape


@dataclass(frozen=True)
class Source:
    """A model found in `path`.

    family     llama, qwen2, qwen3 or smollm3
    fields     ModelConfig fields that the source decides
    weights    edgepool's names (`weight_shapes`)
    tokenizer  text of a tokenizer.json
    """

    path: Path
    family: str
    fields: Mapping[str, Any]
    weights: Mapping[str, LazyTensor]
    tokenizer: Optional[str]


@dataclass(frozen=True)
class Names:
    """How another format calls our tensors: `layers.3.q_proj.weight` -> `blk.3.attn_q.weight`."""

    layer: str
    parts: Mapping[str, str]

    def of(self, name: str) -> str:
        head, _, rest = name.partition(".")
        if head != "layers":
            return f"{self.parts[head]}.{rest}"
        number, part, leaf = rest.split(".")
        return f"{self.layer}.{number}.{self.parts[part]}.{leaf}"


def match_weights(
    path: Path, fields: Mapping[str, Any], names: Names, found: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """The tensors of `found` by our names.

    Raises BadInput, in the source's names, for a missing or extra tensor or a wrong shape.
    """
    try:
        shapes = weight_shapes(ModelConfig(**fields))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    check_names(path, map(names.of, shapes), found)
    for name, shape in shapes.items():
        check_shape(path, names.of(name), found[names.of(name)].shape, shape)
    return {name: found[names.of(name)] for name in shapes}
