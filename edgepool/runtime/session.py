"""A running model: one cache, the tokens it holds, and the steps that extend it.

A `Session` does the bookkeeping that every backend shares: pages, chunked prefill, ragged batches,
rollback. A `Backend` owns the state tensors and runs one step of the graph; `ort_session` and
`torch_session` each open a session over theirs.
"""

from __future__ import annotations

from typing import List, Optional, Protocol, Sequence, Tuple

import numpy as np

from ..config import ModelConfig, state_specs
from ..errors import BadInput


class Backend(Protocol):
    """The model and its state, for a fixed number of sequences and pages.

    cache_bytes  bytes of all state tensors
    step         input_ids [B,S], page_table [B,MP], past_len [B], new_len [B], logit_rows [B,R]
                 int32 -> logits [B,R,vocab] float32, valid until the next step; updates the state.
                 read: whether anybody looks at them, they need not be fetched otherwise
    close        gives back what it holds; nothing can be run afterwards
    """

    cache_bytes: int

    def step(
        self,
        input_ids: np.ndarray,
        page_table: np.ndarray,
        past_len: np.ndarray,
        new_len: np.ndarray,
        logit_rows: np.ndarray,
        read: bool = True,
    ) -> np.ndarray: ...

    def close(self) -> None: ...


def physical_pages(config: ModelConfig, batch: int, capacity: int) -> int:
    """Pages of the pool for `batch` sequences of `capacity` tokens, the null page included."""
    return 1 + batch * -(-capacity // config.page_size)


class Session:
    """B sequences over one cache of `capacity` tokens each.

    token_ids [B,capacity] int32 and lengths [B] are the tokens each sequence consists of;
    past_len [B] int32 says how many of them the state holds. They differ after a rollback: the raw
    keys of closed pools are gone, so the state goes back to a pool boundary, and the next `feed`
    runs the tokens from there again.
    """

    def __init__(
        self, config: ModelConfig, backend: Backend, batch: int, capacity: int, chunk: int
    ) -> None:
        """chunk: the most tokens per sequence in one step; it changes the speed, not the result."""
        pages = -(-capacity // config.page_size)
        self.config = config
        self.capacity = capacity
        self.chunk = chunk
        self.token_ids = np.zeros((batch, capacity), np.int32)
        self.lengths = np.zeros(batch, np.int32)
        self.past_len = np.zeros(batch, np.int32)
        self._backend = backend
        self._page_table = np.arange(1, 1 + batch * pages, dtype=np.int32).reshape(batch, pages)
        pooled = any(spec.name.startswith("tail.") for spec in state_specs(config))
        self._boundary = config.index.ratio if pooled else 1

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the state tensors at this capacity."""
        return self._backend.cache_bytes

    def close(self) -> None:
        """Give the memory back, a GPU's too; the session cannot be used afterwards."""
        self._backend.close()

    def feed(
        self, token_ids: Sequence[Sequence[int]], rows: Optional[Sequence[Sequence[int]]] = None
    ) -> np.ndarray:
        """Append tokens to every sequence (ragged, may be empty) and run them.

        rows [B,R] picks, by index into the sequence's new tokens, whose logits are returned; by
        default the last token's, R = 1. Returns logits [B,R,vocab] float32, NaN in the rows of a
        sequence for which nothing had to be run. Raises BadInput, and leaves the session as it was,
        if a sequence would outgrow the capacity or a token is not in the vocabulary.
        """
        new = [np.asarray(ids, np.int64).reshape(-1) for ids in token_ids]
        self._check(new)
        before = self.lengths.copy()
        for b, ids in enumerate(new):
            self.token_ids[b, before[b] : before[b] + len(ids)] = ids
            self.lengths[b] += len(ids)
        wanted = self.lengths[:, None] - 1 if rows is None else before[:, None] + np.asarray(rows)
        try:
            return self._run(wanted)
        except BaseException:  # a step that was interrupted may have left half an open pool
            self.past_len -= self.past_len % self._boundary
            self.rollback(before.tolist())
            raise

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each sequence."""
        kept = np.asarray(lengths, np.int32)
        if kept.shape != self.lengths.shape or (kept < 0).any() or (kept > self.lengths).any():
            raise BadInput(
                "rollback to %s tokens: the session holds %s"
                % (kept.tolist(), self.lengths.tolist())
            )
        self.past_len = np.where(kept < self.past_len, kept - kept % self._boundary, self.past_len)
        self.lengths = kept.copy()

    def _run(self, wanted: np.ndarray) -> np.ndarray:
        """Run all tokens that the state lacks; wanted [B,R] are positions that get logits."""
        logits: Optional[np.ndarray] = None
        while True:
            new_len = np.minimum(self.lengths - self.past_len, self.chunk)
            if not new_len.any():
                break
            part, inside = self._step(new_len, wanted)
            if logits is None:
                logits = np.full(wanted.shape + (self.config.vocab_size,), np.nan, np.float32)
            columns = np.flatnonzero(inside.any(0))
            for r, column in enumerate(columns):
                logits[inside[:, column], column] = part[inside[:, column], r]
        if logits is None:
            logits = np.full(wanted.shape + (self.config.vocab_size,), np.nan, np.float32)
        return logits

    def _step(self, new_len: np.ndarray, wanted: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """One step of the backend: its logits, and which of `wanted` [B,R] they are."""
        past = self.past_len
        input_ids = np.zeros((self.batch, new_len.max()), np.int32)
        for b, count in enumerate(new_len):
            input_ids[b, :count] = self.token_ids[b, past[b] : past[b] + count]
        row = wanted - past[:, None]
        inside = (row >= 0) & (row < new_len[:, None])
        logit_rows = np.where(inside, row, 0)[:, inside.any(0)]
        if not logit_rows.size:  # the head runs on one row that nobody reads: cheap, never empty
            logit_rows = np.zeros((self.batch, 1), np.int32)
        used = -(-int((past + new_len).max()) // self.config.page_size)
        logits = self._backend.step(
            input_ids,
            np.ascontiguousarray(self._page_table[:, :used]),
            past,
            new_len,
            np.ascontiguousarray(logit_rows, np.int32),
            read=bool(inside.any()),
        )
        self.past_len = past + new_len
        return logits, inside

    def _check(self, new: List[np.ndarray]) -> None:
        if len(new) != self.batch:
            raise BadInput(
                "tokens for %d sequences, but the session has %d" % (len(new), self.batch)
            )
        for b, ids in enumerate(new):
            total = int(self.lengths[b]) + len(ids)
            if total > self.capacity:
                raise BadInput(
                    "sequence %d would hold %d tokens, but the session was opened for %d"
                    % (b, total, self.capacity)
                )
            outside = (ids < 0) | (ids >= self.config.vocab_size)
            if outside.any():
                raise BadInput(
                    "token %d is not in the vocabulary of %d"
                    % (ids[outside][0], self.config.vocab_size)
                )
