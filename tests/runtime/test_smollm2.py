"""A real model: its tokenizer and template against transformers, its text against PyTorch."""

from __future__ import annotations

import pydoc_data.topics
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from edgepool.checkpoint import importer
from edgepool.config import ModelConfig
from edgepool.runtime.detokenize import TextStream
from edgepool.runtime.generate import generate
from edgepool.runtime.ort_session import OrtBackend
from edgepool.runtime.sampling import Sampling
from edgepool.runtime.source import Source, open_source
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
    found = importer.open_source(smollm2_gguf)
    config = ModelConfig(**found.fields)

    def no_session(capacity: int) -> None:
        raise AssertionError("the weights are not needed here")

    return Source(config, Tokenizer(found.tokenizer, config, "gguf"), no_session, "gguf")


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> PreTrainedTokenizerFast:
    found = importer.open_source(smollm2_gguf)
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


# ------------------------------------------------------------------------- the model itself

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little robot who",
    "def fibonacci(n):\n",
    pydoc_data.topics.topics["assignment"][:1500],
    "".join(pydoc_data.topics.topics.values())[:12_000],  # three times the attention budget
]


@pytest.mark.slow
def test_greedy_text_is_that_of_torch(smollm2_bundle: Path) -> None:
    """64 tokens of ONNX Runtime; PyTorch, given the text so far, chooses each of them too."""
    source, reference = open_source(smollm2_bundle), open_source(smollm2_bundle, backend="torch")
    session, torch_session = source.open_session(4200), reference.open_session(4200)
    for prompt in PROMPTS:
        prompt_ids = source.encode(prompt)
        session.rollback([0])
        torch_session.rollback([0])
        run = generate(session, source.tokenizer, prompt_ids, max_new_tokens=64)
        rows = range(len(prompt_ids) - 1, len(prompt_ids) - 1 + len(run.token_ids))
        logits = torch_session.feed([[*prompt_ids, *run.token_ids[:-1]]], [rows])[0]
        assert logits.argmax(-1).tolist() == run.token_ids


@pytest.mark.slow
def test_the_answer_to_a_chat(smollm2_bundle: Path) -> None:
    source = open_source(smollm2_bundle)
    prompt_ids = source.encode_chat(CONVERSATIONS[0])
    session = source.open_session(len(prompt_ids) + 20)
    run = generate(session, source.tokenizer, prompt_ids, max_new_tokens=20)
    assert run.text == "The capital of France is Paris."
    assert run.finish_reason == "stop"


@pytest.mark.slow
def test_python_costs_little_beside_the_model(smollm2_bundle: Path) -> None:
    """Less than 5 % of a decode step is spent outside of the graph."""
    source = open_source(smollm2_bundle)
    session = source.open_session(200)
    backend, inside = session._backend, []

    def timed_step(*arguments: np.ndarray, **options: bool) -> np.ndarray:
        started = time.perf_counter()
        logits = OrtBackend.step(backend, *arguments, **options)
        inside.append(time.perf_counter() - started)
        return logits

    backend.step = timed_step
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1)
    run = generate(session, source.tokenizer, source.encode("Once"), sampling, 100)
    decode = sum(inside[1:])
    assert run.decode_seconds - decode < 0.05 * decode
