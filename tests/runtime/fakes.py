"""A model small enough to be checked by eye, with the contract of the real one."""

from __future__ import annotations

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from edgepool.config import IndexConfig, ModelConfig
from edgepool.runtime.session import Session, physical_pages

SAMPLE = [
    "The quick brown fox and the other.\n",
    "naïve café, 你好世界, привет, 👩‍👩‍👧 🇨🇭 👍🏽",
] * 4


def config(**changes: object) -> ModelConfig:
    """Two sparse layers, pages of 8 tokens, pools of 4; 8 tokens selected, 8 local, 4 sinks."""
    settings = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_context=128,
        layer_types=("sparse", "sparse"),
        index=IndexConfig(block=1, top_k=8),
        window=8,
        sinks=4,
        page_size=8,
    )
    return ModelConfig(**{**settings, **changes})


class FakeBackend:
    """Logits that depend on every token of the context, kept in the form that operators give state.

    Tokens lie in pages. A pool is written only in the step that closes it, from the open pool's
    tail and the new tokens, so a session that rolls back without feeding the tail again, loses
    a token or mixes up pages gets other logits.
    """

    def __init__(self, config: ModelConfig, batch: int, pages: int) -> None:
        self.config = config
        self.cache_bytes = 1234
        self.steps: list[tuple[np.ndarray, np.ndarray]] = []  # (new_len, shape of the page table)
        self.fail_at: int | None = None
        self._pages = np.zeros((pages, config.page_size), np.int64)
        self._pools = np.zeros((pages, config.page_size // config.index.ratio), np.int64)
        self._tail = np.zeros((batch, config.index.ratio), np.int64)

    def step(self, input_ids, page_table, past_len, new_len, logit_rows, read=True) -> np.ndarray:
        for array in (input_ids, page_table, past_len, new_len, logit_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert logit_rows.size
        self.steps.append((new_len.copy(), page_table.shape))
        batch, rows = logit_rows.shape
        logits = np.zeros((batch, rows, self.config.vocab_size), np.float32)
        for b in range(batch):
            hashes = [
                self._append(b, page_table[b], past_len[b] + s, input_ids[b, s])
                for s in range(new_len[b])
            ]
            for r in range(rows):
                if logit_rows[b, r] < new_len[b]:
                    random = np.random.default_rng(hashes[logit_rows[b, r]])
                    logits[b, r] = random.standard_normal(self.config.vocab_size)
        if self.fail_at == len(self.steps):
            raise KeyboardInterrupt
        return logits

    def close(self) -> None:
        self.steps.clear()

    def _append(self, b: int, table: np.ndarray, position: int, token: int) -> int:
        page_size, ratio = self.config.page_size, self.config.index.ratio
        self._pages[table[position // page_size], position % page_size] = token
        self._tail[b, position % ratio] = token
        if position % ratio == ratio - 1:
            pool = self._pools[table[position // page_size]]
            pool[position % page_size // ratio] = hash(tuple(self._tail[b])) & 0xFFFFFFFF
        closed = (position + 1) // ratio
        pools = self._pools[table].reshape(-1)[:closed]
        open_pool = self._tail[b, : (position + 1) % ratio]
        tokens = self._pages[table].reshape(-1)[: position + 1]
        return hash((tuple(pools), tuple(open_pool), tuple(tokens))) & 0xFFFFFFFF


def fake_session(
    config: ModelConfig, batch: int = 1, capacity: int = 64, chunk: int = 16
) -> Session:
    backend = FakeBackend(config, batch, physical_pages(config, batch, capacity))
    return Session(config, backend, batch, capacity, chunk)


def byte_level_json() -> str:
    """A byte-level BPE like SmolLM2's and Qwen's, 310 tokens, `<|end|>` special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken(" odd été", normalized=False), AddedToken("über")])
    return tokenizer.to_str()


def byte_fallback_json() -> str:
    """A BPE like Llama 2's: spaces as U+2581, bytes as `<0xE2>`, one leading space dropped."""
    letters = sorted({c for c in "".join(SAMPLE) if c.isascii() and not c.isspace()})
    words = ["▁", *letters, "th", "ick", "▁fox", "▁é"]
    tokens = ["<unk>", "</s>", *("<0x%02X>" % b for b in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("t", "h")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str()
