"""GGUF import, against transformers' own GGUF loader."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgepool.checkpoint import Checkpoint, Retrofit, import_checkpoint, load
from edgepool.checkpoint.hf_import import NAMES
from edgepool.checkpoint.importer import open_source
from edgepool.config import RopeScaling
from edgepool.errors import BadInput

from .models import SIZES, hf_model, write_folder, write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def imported(path: Path) -> Checkpoint:
    import_checkpoint(path, path.with_suffix(".pt"))
    return load(path.with_suffix(".pt"))


def refused(path: Path) -> str:
    target = path.with_suffix(".pt")
    with pytest.raises(BadInput) as caught:
        import_checkpoint(path, target)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert not target.exists()
    return message


def by_transformers(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.state_dict()


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_weights_equal_transformers(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    """Also the order of the rotary pairs, which llama.cpp changes for llama and not for qwen."""
    path = write_gguf(hf_model(family, **options), tmp_path / "model.gguf")
    checkpoint = imported(path)
    expected = by_transformers(path)
    config = checkpoint.config
    assert config.tie_embeddings == options.get("tie_word_embeddings", False)
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    for name, tensor in checkpoint.weights.items():
        assert torch.equal(tensor, expected[NAMES.of(name)]), name


def test_smollm3_equals_its_folder(tmp_path: Path) -> None:
    """transformers reads no SmolLM3 GGUF; its folder is the oracle (four layers, the last NoPE)."""
    model = hf_model("smollm3")
    gguf_model = imported(write_gguf(model, tmp_path / "model.gguf"))
    folder_model = imported(write_folder(model, tmp_path / "folder"))
    assert gguf_model.config.rope_layers == (True, True, True, False)
    ours, theirs = gguf_model.config.to_dict(), folder_model.config.to_dict()
    assert ours.pop("eos_token_ids") == [2, 0]  # GGUF marks the vocabulary's ends, config.json one
    assert theirs.pop("eos_token_ids") == [2]
    assert ours == theirs
    for name, tensor in folder_model.weights.items():
        assert torch.equal(tensor, gguf_model.weights[name]), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.float16),
        (Kind.Q4_0, torch.float16),
        (Kind.Q4_1, torch.float16),
    ],
)
def test_kinds(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", kind)
    checkpoint = imported(path)
    expected = by_transformers(path)
    for name, tensor in checkpoint.weights.items():
        stored = torch.float32 if tensor.ndim == 1 else dtype
        assert tensor.dtype == stored
        assert torch.equal(tensor, expected[NAMES.of(name)].to(stored)), name


def k_quant_blocks(kind: Kind, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random blocks (gguf cannot quantise to these kinds): any bits, but small finite scales."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // 256, block_bytes), np.uint8)
    scale = generator.uniform(1e-4, 1e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        blocks[:, :4] = scale  # d, dmin
    else:
        blocks[:, -2:] = scale[:, :2]  # d
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_k_quants(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))
    monkeypatch.setattr(
        gguf, "quantize", lambda data, _: k_quant_blocks(kind, data.shape, next(seeds))
    )
    path = write_gguf(hf_model("llama", **WIDE), tmp_path / "model.gguf", kind)
    checkpoint = imported(path)
    expected = by_transformers(path)
    for name, tensor in checkpoint.weights.items():
        assert torch.equal(tensor, expected[NAMES.of(name)].to(tensor.dtype)), name


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    whole = imported(path)
    weights = {name: tensor.clone() for name, tensor in whole.weights.items()}
    monkeypatch.setattr("edgepool.checkpoint.gguf_import.CHUNK", 7 * SIZES["hidden_size"] + 1)
    for name, tensor in imported(path).weights.items():
        assert torch.equal(tensor, weights[name]), name


def test_unsupported_kind_lists_the_supported(tmp_path: Path) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", Kind.Q5_0)
    message = refused(path)
    assert "is Q5_0, which is not supported" in message
    assert "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K" in message


# ------------------------------------------------------------------------------- configuration


def test_configuration(tmp_path: Path) -> None:
    model = hf_model("qwen3", head_dim=24, rms_norm_eps=1e-6)
    path = write_gguf(model, tmp_path / "model.gguf", metadata={"qwen3.rope.freq_base": 1e6})
    config = imported(path).config
    assert (config.hidden_size, config.head_dim, config.num_kv_heads) == (64, 24, 2)
    assert (config.rms_norm_eps, config.rope_theta, config.max_context) == (1e-6, 1e6, 512)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0))
    assert config.chat_template == "{{ messages }}"
    assert config.layer_types == ("sparse",) * 4


def test_retrofit_options(tmp_path: Path) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf")
    summary = import_checkpoint(path, tmp_path / "full.pt", Retrofit("full", kv_dtype="int8"))
    assert summary.config.layer_types == ("full",) * 4
    assert load(tmp_path / "full.pt").config == summary.config
    assert (summary.family, summary.tokens) == ("llama", 320)
    assert summary.parameters == sum(t.numel() for t in load(tmp_path / "full.pt").weights.values())
    assert summary.stored == {"float32": 4 * summary.parameters}


def test_no_vocabulary(tmp_path: Path) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", tokenizer=False)
    checkpoint = imported(path)
    assert checkpoint.tokenizer is None
    assert checkpoint.config.eos_token_ids == ()


def rope_divisors(scaling: dict[str, object]) -> np.ndarray:
    """What llama.cpp's converter stores: by how much transformers divides each frequency."""
    plain = hf_model("llama").config
    scaled = hf_model("llama", rope_parameters={"rope_theta": 10000.0, **scaling}).config
    head_dim = plain.hidden_size // plain.num_attention_heads
    base = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    inverse, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](scaled, "cpu")
    return (base / inverse).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling(tmp_path: Path, factor: float) -> None:
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors = {"rope_freqs.weight": rope_divisors(rule)}
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", tensors=tensors)
    expected = RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert imported(path).config.rope_scaling == expected


def test_rope_freqs_of_ones_scale_nothing(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.ones(8)}
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", tensors=tensors)
    assert imported(path).config.rope_scaling is None


@pytest.mark.parametrize("values", [np.linspace(1, 9, 8), np.ones(5)])
def test_other_rope_freqs_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    tensors = {"rope_freqs.weight": values}
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", tensors=tensors)
    assert "'rope_freqs.weight'" in refused(path)


def scaled(**keys: object) -> dict[str, object]:
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = scaled(type="linear", factor=4.0)
    path = write_gguf(hf_model("llama"), tmp_path / "linear.gguf", metadata=linear)
    assert imported(path).config.rope_scaling == RopeScaling("linear", 4.0, 512)

    yarn = scaled(type="yarn", factor=4.0, original_context_length=256)
    path = write_gguf(hf_model("llama"), tmp_path / "yarn.gguf", metadata=yarn)
    config = imported(path).config
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 256)
    assert config.max_context == 1024

    path = write_gguf(hf_model("llama"), tmp_path / "none.gguf", metadata=scaled(type="none"))
    assert imported(path).config.rope_scaling is None


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "architecture": (dict(metadata={"general.architecture": "gemma2"}), "'gemma2'"),
    "split": (dict(metadata={"split.count": 3}), "one part of a split model"),
    "experts": (dict(metadata={"llama.expert_count": 8}), "'llama.expert_count' is 8"),
    "window": (dict(metadata={"llama.attention.sliding_window": 64}), "sliding_window' is 64"),
    "key": (dict(metadata={"llama.logit_scale": 2.0}), "'llama.logit_scale' is 2.0"),
    "rope": (dict(metadata=scaled(type="longrope", factor=4.0)), "'longrope'"),
    "part": (dict(metadata={"llama.rope.dimension_count": 8}), "dimension_count is 8"),
    "values": (dict(metadata={"llama.attention.value_length": 8}), "value_length is 8"),
    "per layer": (
        dict(metadata={"llama.attention.head_count_kv": [2, 2, 1, 1]}),
        "head_count_kv is [2, 2, 1, 1], expected one integer",
    ),
    "heads": (dict(metadata={"llama.attention.head_count": 0}), "head_count is 0"),
    "no layers": (dict(drop=("llama.block_count",)), "llama.block_count is missing"),
    "eos": (dict(metadata={"tokenizer.ggml.eot_token_id": 320}), "eot_token_id is 320"),
    "no embedding": (dict(drop=("token_embd.weight",)), "'token_embd.weight' is missing"),
    "missing": (dict(drop=("blk.1.ffn_up.weight",)), "'blk.1.ffn_up.weight' is missing"),
    "extra": (dict(tensors={"blk.0.x.weight": np.ones(4)}), "'blk.0.x.weight' belongs to no"),
    "shape": (
        dict(tensors={"blk.0.ffn_norm.weight": np.ones(65)}),
        "'blk.0.ffn_norm.weight' has shape [65], the configuration implies [64]",
    ),
    "nan": (
        dict(tensors={"blk.0.ffn_norm.weight": np.full(64, np.nan)}),
        "'layers.0.mlp_norm.weight' holds NaN or Inf",
    ),
    "vocabulary": (
        dict(
            tensors={"token_embd.weight": np.ones((300, 64)), "output.weight": np.ones((300, 64))}
        ),
        "ids up to 319, the model's vocabulary ends at 299",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    options, expected = FAULTS[fault]
    path = tmp_path / "model.gguf"
    if fault == "architecture":
        write_gguf(hf_model("llama"), path)
        path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
        expected = "architecture 'gemma' is not supported (supported: llama, smollm3, qwen2, qwen3)"
    else:
        write_gguf(hf_model("llama"), path, **options)
    assert expected in refused(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert "no such file" in refused(path)
    path.write_bytes(b"")
    assert "neither a GGUF file nor a folder" in refused(path)
    path.write_text(json.dumps({}))
    assert "neither a GGUF file nor a folder" in refused(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(hf_model("llama"), path, Kind.Q8_0).read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of the header changed: one clear line, or a model whose tensors can be read."""
    damaged = bytearray(small)
    position = data.draw(st.integers(0, 2000) | st.integers(0, small.index(b"output_norm") + 2000))
    damaged[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(bytes(damaged))
    try:
        source = open_source(path)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        for weight in source.weights.values():
            assert tuple(weight.read().shape) == weight.shape
