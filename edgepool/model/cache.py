"""The state of a running model: the graph's state tensors and who owns which page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig, state_specs
from .model import Model


def new_state(
    config: ModelConfig, batch: int, pages: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Zeroed state tensors in the order of `state_specs`, each its own memory.

    pages counts physical pages with the null page; dtype is the graph's float type.
    """
    sizes = {"batch": batch, "pages": pages}
    dtypes = {"float": dtype, "float32": torch.float32, "int8": torch.int8}
    return [
        torch.zeros(
            [sizes[n] if isinstance(n, str) else n for n in spec.shape], dtype=dtypes[spec.dtype]
        )
        for spec in state_specs(config)
    ]


@dataclass
class Cache:
    """One cache for a whole model and batch, advanced by `step`.

    page_table [B,MP] int32; past_len [B] int32; state in graph order; ids holds the tokens of each
    sequence, which a rollback needs: the raw keys of closed pools are gone.
    """

    model: Model
    page_table: Tensor
    past_len: Tensor
    state: list[Tensor]
    ids: list[list[int]]

    @classmethod
    def allocate(
        cls, model: Model, batch: int, capacity: int, dtype: torch.dtype = torch.float32
    ) -> Cache:
        """Pages for `capacity` tokens of each of `batch` sequences."""
        pages = -(-capacity // model.config.page_size)
        table = torch.arange(1, 1 + batch * pages, dtype=torch.int32).view(batch, pages)
        return cls(
            model=model,
            page_table=table,
            past_len=torch.zeros(batch, dtype=torch.int32),
            state=new_state(model.config, batch, 1 + batch * pages, dtype),
            ids=[[] for _ in range(batch)],
        )

    @torch.no_grad()
    def step(self, new_ids: list[list[int]], rows: Tensor | None = None) -> Tensor:
        """Feed the next tokens of every sequence (ragged, may be empty).

        rows [B,R] picks the rows that get logits, by default all S of them.
        Returns logits [B,R,vocab] float32; rows past a sequence's new tokens are meaningless.
        """
        batch = len(self.ids)
        lengths = [len(new) for new in new_ids]
        seq = max(lengths)
        padded = torch.zeros(batch, seq, dtype=torch.int32)
        for b, new in enumerate(new_ids):
            padded[b, : len(new)] = torch.tensor(new, dtype=torch.int32)
        new_len = torch.tensor(lengths, dtype=torch.int32)
        if rows is None:
            rows = torch.arange(seq, dtype=torch.int32).expand(batch, seq)
        used = -(-int((self.past_len + new_len).max()) // self.model.config.page_size)
        logits, *self.state = self.model(
            padded, self.page_table[:, : max(used, 1)], self.past_len, new_len, rows, *self.state
        )
        self.past_len = self.past_len + new_len
        for b, new in enumerate(new_ids):
            self.ids[b] += new
        return logits

    def rollback(self, lengths: list[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each sequence.

        A length inside a pool that had closed re-feeds the pool's first tokens.
        """
        ratio = self.model.config.index.ratio
        again = []
        for b, length in enumerate(lengths):
            start = length - length % ratio
            again.append(self.ids[b][start:length])
            self.ids[b] = self.ids[b][:start]
        self.past_len = torch.tensor([len(ids) for ids in self.ids], dtype=torch.int32)
        if any(again):
            self.step(again)
