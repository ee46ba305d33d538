"""The sizes an engine is built for: TensorRT's optimisation profiles of the two kinds of step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Tuple

from ..config import ModelConfig
from ..errors import BadInput

Bounds = Tuple[int, int, int]  # least, the one to optimise for, most


@dataclass(frozen=True)
class Limits:
    """The largest step and the cache an engine has room for.

    batch      sequences of a step
    input_len  new tokens per sequence in one step of prefill
    kv_tokens  tokens that the pools hold, of all sequences together
    """

    batch: int
    input_len: int
    kv_tokens: int

    def check(self, config: ModelConfig) -> None:
        """Raise BadInput for a limit that the model cannot use."""
        for option, value, most in (
            ("--max-batch-size", self.batch, 1 << 16),
            ("--max-input-len", self.input_len, config.max_context),
            ("--max-kv-tokens", self.kv_tokens, self.batch * config.max_context),
        ):
            if not 1 <= value <= most:
                raise BadInput("%s %d: choose 1 to %d for this model" % (option, value, most))

    def pages(self, config: ModelConfig) -> int:
        """Physical pages of the pools: the null page, and what the tokens take when the last page
        of every sequence holds a single one."""
        sequences = min(self.batch, self.kv_tokens)
        return 1 + sequences + (self.kv_tokens - sequences) // config.page_size


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: bounds of every dynamic axis by its name in the graph."""

    name: str
    axes: Dict[str, Bounds]


def profiles(config: ModelConfig, limits: Limits) -> List[Profile]:
    """One new token per sequence, and prefill in chunks. The pools have one fixed size."""
    pages = limits.pages(config)
    most = min(-(-config.max_context // config.page_size), pages - 1)
    common = {
        "batch": (1, limits.batch, limits.batch),
        "rows": (1, 1, 1),
        "logical_pages": (1, most, most),
        "pages": (pages, pages, pages),
    }
    length = limits.input_len
    return [
        Profile("decode", {**common, "seq": (1, 1, 1)}),
        Profile("prefill", {**common, "seq": (1, length, length)}),
    ]


def shape_of(dims: List[object], profile: Profile, which: int) -> Tuple[int, ...]:
    """A graph input's shape, whose dynamic axes are names, at bound `which` (0 least, 2 most)."""
    return tuple(d if isinstance(d, int) else profile.axes[str(d)][which] for d in dims)
