"""How an imported model attends: everything (`full`), or a fixed number of tokens (`sparse`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..config import IndexConfig
from ..errors import BadInput


@dataclass(frozen=True)
class Retrofit:
    """Attention settings given to a model that was trained without them.

    budget     tokens that a query attends to: sinks, window and selection. A context no longer than
               this is attended whole; in a longer one, fewer than two blocks more, since window
               and selection are rounded up to whole blocks
    window     latest tokens, always attended; sinks: first tokens, always attended
    page_size  tokens per KV page; ratio: keys per pooled index vector
    """

    attention: str = "sparse"
    budget: int = 1024
    window: int = 128
    sinks: int = 16
    page_size: int = 16
    ratio: int = 4
    kv_dtype: str = "fp16"

    def settings(self, num_layers: int) -> dict[str, Any]:
        """Fields of ModelConfig; raises BadInput when the numbers do not fit together."""
        if self.attention not in ("sparse", "full"):
            raise BadInput(f"attention: {self.attention!r} is neither sparse nor full")
        fields: dict[str, Any] = {
            "layer_types": (self.attention,) * num_layers,
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
        }
        if self.attention == "sparse":
            fields.update(window=self.window, sinks=self.sinks, index=self._index())
        return fields

    def _index(self) -> IndexConfig:
        for name in ("budget", "window", "sinks", "page_size", "ratio"):
            least = 0 if name in ("window", "sinks") else 1
            if getattr(self, name) < least:
                raise BadInput(f"{name}: {getattr(self, name)} is below {least}")
        if self.page_size % self.ratio:
            raise BadInput(
                f"page_size: {self.page_size} is not a multiple of the ratio ({self.ratio})"
            )
        if self.sinks % self.ratio:
            raise BadInput(f"sinks: {self.sinks} is not a multiple of the ratio ({self.ratio})")
        # A block is a whole page unless the sinks end inside a page.
        block_tokens = math.gcd(self.page_size, self.sinks)
        always = self.sinks + self.window
        top_k = -(-(self.budget - always) // block_tokens) * block_tokens
        if top_k <= 0:
            raise BadInput(
                f"budget: {self.budget} leaves nothing to select: {self.sinks} sinks and a window "
                f"of {self.window} need a budget of at least {always + 1}"
            )
        return IndexConfig(ratio=self.ratio, block=block_tokens // self.ratio, top_k=top_k)
