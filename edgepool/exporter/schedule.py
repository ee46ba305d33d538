"""What parity and verification feed: a ragged prefill in chunks, then single tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..config import ModelConfig

DECODE_STEPS = 32
SHORTEST, LONGEST = 128, 2560  # tokens of the longest prompt
CHUNKS = (256, 129, 1, 7)  # sizes of the prefill steps, in turn
EXCERPT = 3  # steps that are kept for graphs that differ in their form only
ROWS = 3  # rows per sequence and step whose logits are compared


@dataclass(frozen=True)
class Step:
    """Inputs of one step, int32.

    input_ids [B,S], past_len [B], new_len [B], logit_rows [B,ROWS]: the last real token, the first,
    and one between.
    """

    input_ids: np.ndarray
    past_len: np.ndarray
    new_len: np.ndarray

    @property
    def logit_rows(self) -> np.ndarray:
        last = np.maximum(self.new_len - 1, 0)
        return np.stack([last, np.zeros_like(last), last // 2], axis=1)

    @property
    def real(self) -> np.ndarray:
        """Sequences that have a token in this step: bool [B]."""
        return self.new_len > 0


@dataclass(frozen=True)
class Schedule:
    """Prefill chunks of the prompts, then `decode` steps whose tokens the reference chooses.

    page_table [B,MP] int32 over `pages` physical pages, the null page among them.
    """

    prompts: tuple[tuple[int, ...], ...]
    page_table: np.ndarray
    pages: int
    prefill: tuple[Step, ...]
    decode: int

    @property
    def steps(self) -> int:
        return len(self.prefill) + self.decode

    @property
    def excerpt(self) -> range:
        """Steps in a row from the last large chunk on, so late that sparse layers have to choose.

        With the state before them they are enough for a graph that differs in its form only.
        """
        sizes = [step.input_ids.shape[1] for step in self.prefill]
        first = max((i for i, size in enumerate(sizes) if size > max(CHUNKS[2:])), default=0)
        return range(first, min(first + EXCERPT, self.steps))


def plan(
    config: ModelConfig,
    text_ids: Sequence[int],
    decode: int = DECODE_STEPS,
    longest: int | None = None,
) -> Schedule:
    """Three prompts of different lengths, the longest so long that sparse layers have to choose.

    longest limits that. text_ids are tokens of a text to take the prompts from; without any they
    are pseudo-random. The chunks differ in size, end inside pools and pages, and hold nothing for
    some of the sequences. Pages are handed out in a shuffled order.
    """
    chooser = random.Random(0)
    longest = min(longest or _wanted(config), max(config.max_context - decode, 1))
    lengths = [longest, max(1, longest // 3), min(longest, 13)]
    ids = list(text_ids) or [chooser.randrange(config.vocab_size) for _ in range(longest + 200)]
    prompts = tuple(
        tuple(ids[(start + i) % len(ids)] for i in range(length))
        for start, length in zip((0, 100, 200), lengths)
    )
    used = [-(-(length + decode) // config.page_size) for length in lengths]
    order = list(range(1, 1 + sum(used)))
    chooser.shuffle(order)
    table = np.zeros((len(prompts), max(used)), np.int32)
    for row, count in zip(table, used):
        row[:count] = [order.pop() for _ in range(count)]
    return Schedule(prompts, table, 1 + sum(used), tuple(_chunks(prompts)), decode)


def _wanted(config: ModelConfig) -> int:
    """Tokens that exceed what any window or selection attends to by an eighth, within limits."""
    budgets = [
        config.attended_tokens(i, config.max_context)
        for i, kind in enumerate(config.layer_types)
        if kind != "full"
    ]
    budget = max(budgets, default=0)
    return min(max(budget + budget // 8 + 2 * config.page_size, SHORTEST), LONGEST)


def _chunks(prompts: tuple[tuple[int, ...], ...]) -> Iterator[Step]:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    past, turn = np.zeros_like(lengths), 0
    while (past < lengths).any():
        left = lengths - past
        size = min(CHUNKS[turn % len(CHUNKS)], int(left.max()))
        limits = np.array([size, max(1, size - 3), 5])
        new = np.minimum(left, limits).astype(np.int32)
        new[1] *= turn % 3 != 2  # nothing for the second sequence in every third step
        if not new.any():
            new = np.minimum(left, 1).astype(np.int32)
        ids = np.zeros((len(prompts), int(new.max())), np.int32)
        for b, prompt in enumerate(prompts):
            ids[b, : new[b]] = prompt[past[b] : past[b] + new[b]]
        yield Step(ids, past, new)
        past, turn = past + new, turn + 1


def decode_step(tokens: np.ndarray, past: np.ndarray) -> Step:
    """One more token [B] for every sequence."""
    return Step(tokens.astype(np.int32)[:, None], past.astype(np.int32), np.ones_like(past))
