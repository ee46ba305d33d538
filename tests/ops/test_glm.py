"""IndexPool and IndexPoolSelect against the indexer of transformers' glm5_next.

That indexer has index keys of one head, pools weighted by a learned gate, DSA's relu scores, and
window = sinks = 0: the incomplete last pool is attended as it is.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from edgepool import ops
from edgepool.ops.index_pool_select import block_scores
from edgepool.ops.paging import local_start

glm5_next = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")

HIDDEN, RANK, HEADS, DIM, TOP_TOKENS = 48, 40, 32, 32, 64


class IndexerCache:
    """The part of a cache that the indexer asks for: what it packed, one layer."""

    def __init__(self) -> None:
        self.keys = torch.zeros(0)
        self.layers = [self]

    def update_indexer(self, packed: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys = torch.cat([self.keys, packed], 1) if self.keys.numel() else packed
        return self.keys

    def get_seq_length(self) -> int:
        return self.keys.shape[1]


def indexer(ratio: int, tail: bool) -> torch.nn.Module:
    config = SimpleNamespace(
        hidden_size=HIDDEN, index_n_heads=HEADS, index_head_dim=DIM, index_topk=TOP_TOKENS,
        qk_rope_head_dim=0, q_lora_rank=RANK, index_kpool=ratio,
        index_kpool_always_select_tail=tail,
    )  # fmt: skip
    module = glm5_next.Glm5NextTextIndexer(config, 0).eval()
    torch.nn.init.normal_(module.index_kpool_compress_ape)
    torch.nn.init.normal_(module.index_kpool_compress_gate, std=0.2)
    return module.requires_grad_(False)


class Ours:
    """The same weights through our operators, over permuted pages, rows moved to the left."""

    def __init__(self, module: torch.nn.Module, batch: int, length: int) -> None:
        self.module, self.ratio = module, module.index_kpool
        page = 4 * self.ratio
        columns = -(-length // page)
        self.table = (torch.randperm(batch * columns) + 1).view(batch, columns).int()
        self.tail = torch.zeros(batch, self.ratio, 2, 1, DIM)
        self.pool = torch.zeros(1, batch * columns + 1, 4, DIM)
        self.past = torch.zeros(batch, dtype=torch.int32)

    def step(
        self, hidden: torch.Tensor, rank: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Selected pools [B, S, k], scores [B, S, pools] and positions [B, S], from row 0."""
        m, new = self.module, mask.sum(1).int()
        order = torch.argsort(~mask, dim=1, stable=True)[..., None]  # real rows first
        hidden, rank = hidden.take_along_dim(order, 1), rank.take_along_dim(order, 1)
        q = m.wq_b(rank).unflatten(-1, (1, HEADS, DIM))
        w = (m.weights_proj(hidden) * HEADS**-0.5)[:, :, None]
        keys = m.k_norm(m.wk(hidden))[:, :, None]
        gates = torch.nn.functional.linear(hidden, m.index_kpool_compress_gate)[:, :, None]
        none, paging = torch.zeros(1), (self.table, self.past, new)
        self.tail, self.pool, _ = ops.index_pool(
            keys, gates, m.index_kpool_compress_ape[:, None], none, self.tail, self.pool, none,
            *paging, self.ratio, "gate", "none", 0, 0.0,
        )  # fmt: skip
        rules = dict(scoring="relu", block=1, ratio=self.ratio, window=0, sinks=0)
        selected = ops.index_pool_select(
            q, w, self.pool, none, *paging, k=TOP_TOKENS // self.ratio, **rules
        )
        scores = block_scores(q, w, self.pool, none, *paging, **rules)
        position = self.past[:, None] + torch.arange(hidden.shape[1])
        self.past = self.past + new
        return selected[:, :, 0], scores[:, :, 0], position


def steps_of(way: str, length: int) -> list[int]:
    if way == "one shot":
        return [length]
    if way == "tokens":
        return [1] * length
    return [37] * (length // 37) + [length % 37] * (length % 37 > 0)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("ratio", [4, 16])
@pytest.mark.parametrize(
    "length, way, padding",
    [
        (64, "tokens", (0, 7)),
        (64, "one shot", (5, 40)),
        (150, "chunks", (0, 64)),
        (150, "one shot", (0, 0)),
        (333, "one shot", (5, 40)),
    ],
)
def test_selects_what_glm_selects(
    ratio: int, tail: bool, length: int, way: str, padding: tuple[int, int], monkeypatch
) -> None:
    torch.manual_seed(ratio + length)
    module = indexer(ratio, tail)
    hidden, rank = torch.randn(2, length, HIDDEN), torch.randn(2, length, RANK)
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    theirs, ours = IndexerCache(), Ours(module, 2, length)
    topk, their_scores = torch.Tensor.topk, []
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda x, *a, **k: their_scores.append(x) or topk(x, *a, **k)
    )
    start = compared = 0
    for size in steps_of(way, length):
        part = slice(start, start + size)
        wanted = module(hidden[:, part], rank[:, part], mask[:, part], theirs)
        selected, scores, position = ours.step(hidden[:, part], rank[:, part], mask[:, part])
        for b in range(2):
            rows = mask[b, part].nonzero().flatten().tolist()
            assert (wanted[b, ~mask[b, part]] == -1).all()
            for s, row in enumerate(rows):
                score = scores[b, s]
                candidates = score > -torch.inf
                found = their_scores[-1][b, row][: candidates.sum()]
                torch.testing.assert_close(found, score[candidates], rtol=1e-5, atol=1e-5)
                assert (their_scores[-1][b, row][candidates.sum() :] < -1e30).all()

                t = int(position[b, s])
                their = {int(x) - padding[b] for x in wanted[b, row] if x >= 0}
                mine = {
                    p * ratio + i for p in selected[b, s].tolist() if p >= 0 for i in range(ratio)
                }
                if tail:
                    mine |= set(range(int(local_start(torch.tensor(t), 0, ratio)), t + 1))
                if mine != their:  # a tie at the cut-off: the pools that differ score the same
                    values = score[sorted({x // ratio for x in mine ^ their})]
                    assert values.max() - values.min() <= 1e-6
                compared += 1
        start += size
    assert compared == int(mask.sum())
