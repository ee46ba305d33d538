"""Rebuild tokenizer.json from the vocabulary in a GGUF file.

Two kinds are understood: `gpt2` (byte-level BPE; `tokenizer.ggml.pre` names how text is cut into
words) and `llama` (SentencePiece BPE with byte fallback). Word patterns: the tokenizer.json of the
models that llama.cpp's table (src/llama-vocab.cpp) stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Words:
    """How text becomes words: patterns applied one after the other to what is left.

    ignore_merges  a word that is a token is taken whole
    add_bos        whether a file that does not say so wants the BOS token first
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


LLAMA3_WORDS = Words((LLAMA3,), ignore_merges=True, add_bos=True)
WORDS = {
    "smollm": Words((r"\p{N}", GPT2)),
    "gpt-2": Words((GPT2,)),
    "qwen2": Words((QWEN2,), nfc=True),
    "deepseek-r1-qwen": Words((QWEN2,)),
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "smaug-bpe": Words((LLAMA3,)),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# Control tokens at which generation stops, beside the one that the file calls EOS.
END_TOKENS = {
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>",
}  # fmt: skip


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Optional[str]:
    """Text of a tokenizer.json, or None for a file without vocabulary. Raises BadInput."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens, kinds = _vocabulary(path, metadata)
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level(path, metadata, tokens)
        elif kind == "llama":
            tokenizer, add_bos = _sentencepiece(path, metadata, tokens, kinds), True
        else:
            raise BadInput(f"{path}: tokenizer {kind!r} is not supported (supported: gpt2, llama)")
        _add_tokens(tokenizer, tokens, kinds)
        _add_ends(path, tokenizer, metadata, tokens, add_bos)
        return tokenizer.to_str()
    except BadInput:
        raise
    except Exception as error:  # the base class is what tokenizers raises
        raise BadInput(f"{path}: the vocabulary makes no tokenizer: {error}") from error


def end_tokens(path: Path, metadata: Mapping[str, Any]) -> tuple[Optional[int], tuple[int, ...]]:
    """(BOS id or None, ids at which generation stops, the file's own EOS first)."""
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None, ()
    tokens, kinds = _vocabulary(path, metadata)
    named = [_token_id(path, metadata, name, tokens) for name in ("eos", "eot", "eom")]
    known = [i for i, t in enumerate(tokens) if t in END_TOKENS and kinds[i] == CONTROL]
    ends = dict.fromkeys(i for i in named + known if i is not None)
    return _token_id(path, metadata, "bos", tokens), tuple(ends)


def _byte_level(
    path: Path, metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in WORDS:
        raise BadInput(
            f"{path}: pre-tokenizer {pre!r} is not supported (supported: {', '.join(WORDS)})"
        )
    words = WORDS[pre]
    merges = []
    for merge in _strings(path, metadata, "merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words.ignore_merges))
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    bytes_to_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_to_text])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.add_bos


def _sentencepiece(
    path: Path, metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> Tokenizer:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise BadInput(f"{path}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadInput(f"{path}: tokenizer.ggml.scores does not list one score per token")
    unknown = _token_id(path, metadata, "unknown", tokens) or 0
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges_of_scores(tokens, kinds, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_of_scores(
    tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Merges in SentencePiece's order: the pair that makes the token of the highest score first."""
    pieces = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores)
        if kind in (NORMAL, USER_DEFINED)
    }
    merges = []
    for token, score in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, -len(left), left, right))
    return [(left, right) for _, _, left, right in sorted(merges)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are only kept whole."""
    special, plain = [], []
    for token, kind in zip(tokens, kinds):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_ends(
    path: Path,
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    add_bos: bool,
) -> None:
    """Put BOS before, and EOS after, a prompt, when the file wants them."""
    around = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        wanted = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        around[name] = _token_id(path, metadata, name, tokens) if wanted else None
    bos, eos = around["bos"], around["eos"]
    if bos is None and eos is None:
        return
    first = [] if bos is None else [tokens[bos]]
    last = [] if eos is None else [tokens[eos]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys((bos, eos)) if i is not None],
    )


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _strings(path, metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise BadInput(f"{path}: tokenizer.ggml.tokens lists a token twice")
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise BadInput(f"{path}: tokenizer.ggml.token_type does not list one kind per token")
    return tokens, kinds


def _strings(path: Path, metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise BadInput(f"{path}: tokenizer.ggml.{name} is not a list of strings")
    return values


def _token_id(
    path: Path, metadata: Mapping[str, Any], name: str, tokens: list[str]
) -> Optional[int]:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise BadInput(f"{path}: tokenizer.ggml.{name}_token_id is {value!r}, not a token's id")
    return value
