"""ONNX Runtime against PyTorch, through sessions and whole generations of a small model."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.runtime import ort_session, torch_session
from edgepool.runtime.generate import Completion, generate
from edgepool.runtime.session import Session
from edgepool.runtime.source import open_source

from .models import token_ids

PROMPTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog, and " * 2,
    "naïve café 你好 👍🏽",
    "0123456789" * 5,
    "def f(x):\n    return x + 1\n",
]


def sessions(exported: Path, **options: int) -> tuple[Session, Session]:
    checkpoint = load(exported / "model.pt")
    graph = exported / "edgepool-bundle" / "model.onnx"
    return (
        torch_session.open_session(checkpoint, **options),
        ort_session.open_session(graph, checkpoint.config, threads=1, **options),
    )


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_ragged_steps_and_rollback(exported: Path) -> None:
    for chunk in (5, 64):
        reference, session = sessions(exported, batch=2, capacity=100, chunk=chunk)
        texts = [token_ids(50, seed=1), token_ids(37, seed=2)]
        for a, b in ((0, 3), (3, 4), (4, 37)):
            step = [texts[0][a:b], texts[1][a:b]]
            close(session.feed(step), reference.feed(step))
        step = [texts[0][37:], []]
        close(session.feed(step)[0], reference.feed(step)[0])
        for s in (session, reference):
            s.rollback([41, 18])
        step = [[7], texts[1][:9]]
        close(session.feed(step), reference.feed(step))
        assert session.cache_bytes == reference.cache_bytes


def test_greedy_text_is_the_same(exported: Path) -> None:
    def completions(backend: str) -> list[Completion]:
        source = open_source(exported / "edgepool-bundle", backend, threads=1)
        session = source.open_session(124)
        results = []
        for prompt in PROMPTS:
            session.rollback([0])
            prompt_ids = source.encode(prompt)[:60]
            results.append(generate(session, source.tokenizer, prompt_ids, max_new_tokens=64))
        return results

    for ort, torch in zip(completions("ort"), completions("torch")):
        assert len(ort.token_ids) == 64
        assert ort.token_ids == torch.token_ids
        assert ort.text == torch.text
        assert ort.attended_fraction == torch.attended_fraction


def test_the_graph_updates_the_bound_buffers(exported: Path) -> None:
    bundle = Bundle.open(exported / "edgepool-bundle")
    backend = ort_session.OrtBackend(bundle.model_path, bundle.config, 1, 17, threads=1)
    session = Session(bundle.config, backend, batch=1, capacity=128, chunk=32)
    addresses = {name: value.data_ptr() for name, value in backend.state.items()}
    session.feed([token_ids(40)])
    before = {name: value.numpy().copy() for name, value in backend.state.items()}
    for token in range(9):
        session.feed([[token]])
    assert {name: value.data_ptr() for name, value in backend.state.items()} == addresses
    pools = [name for name in before if name.startswith(("k_pool", "v_pool"))]
    assert pools
    for name in pools:
        after = backend.state[name].numpy()
        assert before[name][5].any()
        np.testing.assert_array_equal(after[1:6], before[name][1:6])  # full pages stay
        assert after[6].any()  # tokens 40.. went into the next page
        assert not after[0].any()  # the null page stays zero


def test_a_step_copies_no_cache(exported: Path) -> None:
    """A step over 60 MB (INT8) or 570 MB of state takes what it takes over a 4,096th of it."""
    bundle = Bundle.open(exported / "edgepool-bundle")

    def step_seconds(pages: int) -> float:
        backend = ort_session.OrtBackend(bundle.model_path, bundle.config, 1, pages, threads=1)
        session = Session(bundle.config, backend, batch=1, capacity=128, chunk=32)
        session.feed([token_ids(40)])
        times = []
        for token in range(30):
            started = time.perf_counter()
            session.feed([[token]])
            times.append(time.perf_counter() - started)
        return min(times)

    assert step_seconds(17 << 12) < step_seconds(17) + 0.005
