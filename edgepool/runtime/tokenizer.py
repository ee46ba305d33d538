"""The tokenizer of a bundle or checkpoint: text to token ids, and token ids to bytes."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

import tokenizers

from ..config import ModelConfig
from ..errors import BadInput

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A Hugging Face `tokenizer.json`, held to a model's vocabulary."""

    def __init__(self, text: str, config: ModelConfig, where: str) -> None:
        """text: the JSON; where: the file to name if it is bad. Raises BadInput."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise BadInput(
                "%s: not a tokenizer.json that can be read: %s" % (where, error)
            ) from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values(), default=-1)
        if size > config.vocab_size:
            raise BadInput(
                "%s: %d tokens do not fit the model's vocabulary of %d: "
                "take the tokenizer that came with the model" % (where, size, config.vocab_size)
            )
        self._tokenizer.no_truncation()  # settings of somebody's training run
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token_id for token_id, token in added.items() if token.special}
        self._decoder = self._tokenizer.decoder
        self._byte_level = isinstance(self._decoder, tokenizers.decoders.ByteLevel)
        self._byte_fallback = self._joined("a", "<0x41>") == "aA"
        self._cache: Dict[int, bytes] = {}

    def encode(self, text: str, special_tokens: bool = True) -> List[int]:
        """Token ids of `text`, with the beginning-of-text token if the tokenizer adds one.

        Raises BadInput for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput("the text is not valid UTF-8 (character %d)" % error.start) from error
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: List[int]) -> str:
        """The text of the tokens, special ones left out: the library's own decoding."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token(self, token_id: Optional[int]) -> str:
        """The token as the vocabulary writes it, or an empty string."""
        return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """The UTF-8 bytes that the token adds to the text; they may be part of a character.

        first: nothing came before it (tokenizers in the manner of SentencePiece drop the space of
        the first word). Special tokens, and ids that only padded the vocabulary, add nothing.
        """
        if first:
            return self._bytes(token_id, True)
        if token_id not in self._cache:
            self._cache[token_id] = self._bytes(token_id, False)
        return self._cache[token_id]

    def _bytes(self, token_id: int, first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        if self._byte_level:
            mapped = [BYTE_OF_CHARACTER[c] for c in token if c in BYTE_OF_CHARACTER]
            return bytes(mapped) if len(mapped) == len(token) else token.encode()
        byte = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte:
            return bytes([int(byte.group(1), 16)])
        return (self._joined(token) if first else self._joined("a", token)[1:]).encode()

    def _joined(self, *tokens: str) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(list(tokens))


def _byte_level_alphabet() -> Dict[str, int]:
    """The characters by which byte-level BPE (GPT-2) writes the 256 bytes.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


BYTE_OF_CHARACTER = _byte_level_alphabet()
