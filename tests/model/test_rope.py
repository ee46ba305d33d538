"""Rotary frequencies against transformers' own."""

import pytest
import torch

from edgepool.config import ModelConfig, RopeScaling
from edgepool.model.rope import inverse_frequencies, rotate, rotation

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

CASES = {
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 4.0, 512), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn": (
        RopeScaling("yarn", 4.0, 512),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn-untruncated": (
        RopeScaling(
            "yarn", 16.0, 256, beta_fast=20, beta_slow=2, attention_factor=1.3, truncate=False
        ),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 20,
            "beta_slow": 2,
            "attention_factor": 1.3,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    ),
}


def config(scaling, theta=10000.0):
    return ModelConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_context=2048,
        rope_theta=theta,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name, theta):
    scaling, parameters = CASES[name]
    reference = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    if name == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        want, want_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference, "cpu")
    got, factor = inverse_frequencies(config(scaling, theta))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-7)


def test_rotation_keeps_relative_positions():
    """<rotate(q, m), rotate(k, n)> depends on m - n alone, and a rotation keeps the norm."""
    frequencies, factor = inverse_frequencies(config(None))
    torch.manual_seed(0)
    q, k = (
        torch.randn(1, 1, 2, 64, dtype=torch.float64),
        torch.randn(1, 1, 2, 64, dtype=torch.float64),
    )

    def turned(x, at):
        cos, sin = rotation(torch.tensor([[at]], dtype=torch.int32), frequencies.double(), factor)
        return rotate(x, cos.double(), sin.double())

    near = (turned(q, 7) * turned(k, 3)).sum(-1)
    far = (turned(q, 1007) * turned(k, 1003)).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(turned(q, 9).norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)
