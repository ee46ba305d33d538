"""How a sequence is cut into steps, and where its pages are, makes no difference to an operator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgepool import ops

PAGE, RATIO, HEADS, GROUP, DIM, TOP = 8, 4, 2, 2, 8, 2
KINDS = {
    "keys": dict(weighting="query", scoring="softmax"),
    "learned": dict(weighting="gate", scoring="relu"),
}
RULES = dict(window=6, sinks=4)


@dataclass
class Inputs:
    """Everything a layer is given for each token of one sequence: [1, L, ...]."""

    tensors: dict[str, torch.Tensor]

    def slice(self, start: int, end: int) -> dict[str, torch.Tensor]:
        return {name: x[:, start:end] for name, x in self.tensors.items()}


class Sequence:
    """One layer's state for one sequence: index, keys and values."""

    def __init__(self, kind: str, storage: torch.dtype, table: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ape = torch.randn(RATIO, HEADS, DIM, generator=generator)
        self.kind, self.table = KINDS[kind], torch.tensor([table], dtype=torch.int32)
        pages, scaled = max(table) + 1, storage == torch.int8
        self.past = 0
        self.tail = torch.zeros(1, RATIO, 2, HEADS, DIM)
        self.index = [
            torch.zeros(HEADS, pages, PAGE // RATIO, DIM, dtype=storage),
            torch.zeros(HEADS, pages, PAGE // RATIO) if scaled else torch.zeros(1),
        ]
        pool = torch.zeros(pages, HEADS, PAGE, DIM, dtype=storage)
        scale = torch.zeros(pages, HEADS, PAGE) if scaled else torch.zeros(1)
        self.cache = [pool, pool.clone(), scale, scale.clone()]

    def step(self, x: dict[str, torch.Tensor], new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed rows, of which `new` are real; their attention and selection."""
        paging = (self.table, *(torch.tensor([n], dtype=torch.int32) for n in (self.past, new)))
        self.tail, *self.index = ops.index_pool(
            x["keys"], x["gates"], self.ape, torch.zeros(1), self.tail, *self.index, *paging,
            RATIO, self.kind["weighting"], "none", 0, 0.0,
        )  # fmt: skip
        weights = x["w"] if self.kind["scoring"] == "relu" else torch.zeros(1)
        selected = ops.index_pool_select(
            x["iq"], weights, *self.index, *paging,
            scoring=self.kind["scoring"], k=TOP, block=1, ratio=RATIO, **RULES,
        )  # fmt: skip
        out, *self.cache = ops.shared_kv_attention(
            x["q"], x["k"], x["v"], *self.cache, *paging, selected,
            block_tokens=RATIO, scale=DIM**-0.5, select=1, **RULES,
        )  # fmt: skip
        self.past += new
        return out[:, :new], selected[:, :new]

    def feed(self, inputs: Inputs, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens up to the last cut in steps that end at each; all outputs."""
        results = []
        for end in cuts:
            results.append(self.step(inputs.slice(self.past, end), end - self.past))
        out, selected = zip(*results, strict=True)
        return torch.cat(out, 1), torch.cat(selected, 1)


def random_sequence(seed: int, length: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, *shape, generator=generator)

    names = dict.fromkeys(("keys", "gates", "k", "v"), (HEADS, DIM))
    names.update(q=(HEADS * GROUP, DIM), iq=(HEADS, GROUP, DIM), w=(HEADS, GROUP))
    return Inputs({name: normal(*shape) for name, shape in names.items()})


kinds = pytest.mark.parametrize("kind", KINDS)
storages = pytest.mark.parametrize("storage", [torch.float32, torch.int8])


@kinds
@storages
@given(data=st.data(), length=st.integers(1, 70), seed=st.integers(0, 2**16))
def test_any_cut_gives_the_same(
    kind: str, storage: torch.dtype, data: st.DataObject, length: int, seed: int
) -> None:
    """One shot against random cuts, token by token, and other pages; closed pools never change."""
    inputs, pages = random_sequence(seed, length), -(-length // PAGE)
    table = list(range(1, pages + 1))
    whole = Sequence(kind, storage, table, seed)
    out, selected = whole.feed(inputs, [length])
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=5)) | {length})
    moved = data.draw(st.permutations(table))
    for steps, places in ((cuts, moved), (list(range(1, length + 1)), table)):
        other = Sequence(kind, storage, places, seed)
        seen: dict[int, torch.Tensor] = {}
        parts = []
        for end in steps:
            parts.append(other.step(inputs.slice(other.past, end), end - other.past))
            by_pool = other.index[0][:, other.table[0].long()].flatten(1, 2)
            for number in range(end // RATIO):
                kept = seen.setdefault(number, by_pool[:, number].clone())
                assert torch.equal(by_pool[:, number], kept)
            assert not other.index[0][:, 0].any() and not other.cache[0][0].any()
        assert torch.equal(torch.cat([x for _, x in parts], 1), selected)
        torch.testing.assert_close(torch.cat([x for x, _ in parts], 1), out, rtol=1e-5, atol=1e-5)
        assert torch.equal(other.tail, whole.tail)


@kinds
@storages
@given(length=st.integers(1, 40), seed=st.integers(0, 2**16), padding=st.integers(1, 9))
def test_padding_rows_change_nothing(
    kind: str, storage: torch.dtype, length: int, seed: int, padding: int
) -> None:
    inputs, table = random_sequence(seed, length + padding), list(range(1, 8))
    padded, plain = (Sequence(kind, storage, table, seed) for _ in range(2))
    first = padded.step(inputs.slice(0, length + padding), length)
    second = plain.step(inputs.slice(0, length), length)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0], second[0], rtol=1e-6, atol=1e-6)
    states = (
        (padded.tail, *padded.index, *padded.cache),
        (plain.tail, *plain.index, *plain.cache),
    )
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


@kinds
@storages
@given(seed=st.integers(0, 2**16), length=st.integers(25, 60))
def test_rollback_replays_the_open_pool(
    kind: str, storage: torch.dtype, seed: int, length: int
) -> None:
    """Back to every p within three pages, by feeding again from floor(p / r) * r; then the same
    tokens give the same, though the pages still hold what was written after p."""
    inputs, table = random_sequence(seed, length), list(range(1, 9))
    sequence = Sequence(kind, storage, table, seed)
    out, selected = sequence.feed(inputs, [length])
    for back in range(1, 3 * PAGE + 1):
        p = length - back
        sequence.past = p // RATIO * RATIO
        sequence.tail = torch.zeros_like(sequence.tail)
        start = sequence.past
        again, chosen = sequence.feed(inputs, [p, length] if p > start else [length])
        assert torch.equal(chosen, selected[:, start:])
        torch.testing.assert_close(again, out[:, start:], rtol=1e-5, atol=1e-5)
