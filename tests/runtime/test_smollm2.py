"""The tokenizer and chat template of a real model, against transformers."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from edgepool.checkpoint.importer import open_source
from edgepool.config import ModelConfig
from edgepool.runtime.detokenize import TextStream
from edgepool.runtime.source import Source
from edgepool.runtime.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say 你好 👍\n"},
        {"role": "assistant", "content": "你好 👍"},
        {"role": "user", "content": "  And {{ again }}?"},
    ],
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Source:
    found = open_source(smollm2_gguf)
    config = ModelConfig(**found.fields)

    def no_session(capacity: int) -> None:
        raise AssertionError("the weights are not needed here")

    return Source(config, Tokenizer(found.tokenizer, config, "gguf"), no_session)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> PreTrainedTokenizerFast:
    found = open_source(smollm2_gguf)
    fast = FastTokenizer.from_str(found.tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=found.fields["chat_template"],
    )


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_prompt(smollm2: Source, reference: PreTrainedTokenizerFast, messages: list) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected_ids = reference(expected, add_special_tokens=False)["input_ids"]
    assert smollm2.encode_chat(messages) == expected_ids
    assert "<|im_start|>assistant\n" in expected


def test_streamed_english(smollm2: Source) -> None:
    text = "".join(pydoc_data.topics.topics.values())[:200_000]
    token_ids = smollm2.encode(text)
    stream = TextStream(smollm2.tokenizer)
    assert "".join(map(stream.push, token_ids)) + stream.finish() == text
