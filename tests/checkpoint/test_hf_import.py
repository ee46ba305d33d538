"""Hugging Face folders, as transformers writes and reads them."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from edgepool.checkpoint import Checkpoint, import_checkpoint, load
from edgepool.checkpoint.hf_import import NAMES
from edgepool.checkpoint.importer import open_source
from edgepool.config import ModelConfig, RopeScaling
from edgepool.errors import BadInput

from .models import SIZES, hf_model, write_folder


def imported(folder: Path) -> Checkpoint:
    target = folder.with_suffix(".pt")
    import_checkpoint(folder, target)
    return load(target)


def refused(folder: Path) -> str:
    target = folder.with_suffix(".pt")
    with pytest.raises(BadInput) as caught:
        import_checkpoint(folder, target)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    assert not target.exists()
    return message


def edit(file: Path, **changes: object) -> None:
    """Change keys of a JSON file; None takes a key out."""
    record = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(hf_model("llama"), tmp_path / "model")


def equal_weights(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    state = model.state_dict()
    for name, tensor in checkpoint.weights.items():
        assert tensor.dtype == state[NAMES.of(name)].dtype
        assert torch.equal(tensor, state[NAMES.of(name)]), name


# ------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 24, "num_key_value_heads": None}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
        ("qwen3", {}),
        ("smollm3", {}),
        ("smollm3", {"tie_word_embeddings": False, "no_rope_layer_interval": 2}),
    ],
)
def test_families(tmp_path: Path, family: str, options: dict[str, object]) -> None:
    model = hf_model(family, **options)
    checkpoint = imported(write_folder(model, tmp_path / "model"))
    equal_weights(checkpoint, model)
    ours, theirs = checkpoint.config, model.config
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads) == (4, theirs.num_key_value_heads)
    assert ours.head_dim == model.model.layers[0].self_attn.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.max_context == 512
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    rotates = getattr(theirs, "no_rope_layers", [1] * 4)
    assert ours.rope_layers == tuple(map(bool, rotates))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_keys_left_out_mean_what_transformers_means(tmp_path: Path, family: str) -> None:
    """A minimal config.json, as older versions and people write them."""
    head_dim = {"head_dim": 128} if family == "qwen3" else {}
    model = hf_model(family, **head_dim)
    folder = write_folder(model, tmp_path / "model")
    kept = {
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    }  # fmt: skip
    record = json.loads((folder / "config.json").read_text())
    record = {key: value for key, value in record.items() if key in kept}
    (folder / "config.json").write_text(json.dumps({**record, "model_type": family}))
    (folder / "generation_config.json").unlink()
    theirs = AutoConfig.from_pretrained(folder)
    config = imported(folder).config
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.rope_layers == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = hf_model("qwen2").to(dtype)
    checkpoint = imported(write_folder(model, tmp_path / "model"))
    equal_weights(checkpoint, model)


def test_tied_file_that_holds_both(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    checkpoint = imported(folder)
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.weights


def test_old_rotary_buffers_are_left_out(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert imported(folder).weights


# ------------------------------------------------------------------------------- rope scaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = [
    (LLAMA3, RopeScaling("llama3", 8.0, 256), 512),
    ({"rope_type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0, 512), 512),
    (YARN, RopeScaling("yarn", 4.0, 256), 1024),
    (
        {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False},
        RopeScaling(
            "yarn", 4.0, 256, beta_fast=16, beta_slow=2, attention_factor=1.5, truncate=False
        ),
        1024,
    ),
    ({"rope_type": "default"}, None, 512),
]


@pytest.mark.parametrize(("rope", "expected", "context"), SCALINGS)
def test_rope_parameters(
    tmp_path: Path, rope: dict[str, object], expected: RopeScaling | None, context: int
) -> None:
    model = hf_model("llama", rope_parameters={"rope_theta": 5e5, **rope})
    config = imported(write_folder(model, tmp_path / "model")).config
    assert config.rope_scaling == expected
    assert (config.rope_theta, config.max_context) == (5e5, context)


@pytest.mark.parametrize(("rope", "expected", "context"), SCALINGS)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_of_transformers_4(
    folder: Path, rope: dict[str, object], expected: RopeScaling | None, context: int, key: str
) -> None:
    rope = {key if name == "rope_type" else name: value for name, value in rope.items()}
    edit(folder / "config.json", rope_parameters=None, rope_scaling=rope, rope_theta=5e5)
    config = imported(folder).config
    assert config.rope_scaling == expected
    assert (config.rope_theta, config.max_context) == (5e5, context)


def test_yarn_with_mscale(folder: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2}
    edit(folder / "config.json", rope_parameters=rope)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(folder), "cpu")
    assert imported(folder).config.rope_scaling.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"type": "mrope"}, "'mrope' is not supported"),
        ({"rope_type": "linear"}, "key 'factor' is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2', expected a positive number"),
        ({**LLAMA3, "low_freq_factor": None}, "'low_freq_factor' is missing"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_other_rope_is_refused(folder: Path, rope: dict[str, object], expected: str) -> None:
    edit(folder / "config.json", rope_parameters=rope)
    assert expected in refused(folder)


# ------------------------------------------------------------------------------- tokens


def test_tokenizer_comes_without_truncation(folder: Path) -> None:
    file = folder / "tokenizer.json"
    truncation = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    original = json.loads(file.read_text())
    file.write_text(json.dumps({**original, "truncation": truncation}))
    assert json.loads(imported(folder).tokenizer) == original


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert imported(folder).tokenizer is None
    (folder / "tokenizer.model").write_bytes(b"x")
    folder.with_suffix(".pt").unlink()
    assert "has tokenizer.model but no tokenizer.json" in refused(folder)


def test_end_tokens_of_all_files(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 2])
    edit(folder / "config.json", eos_token_id=7)
    settings = {"eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert imported(folder).config.eos_token_ids == (5, 2, 7, 0)


def test_chat_template(folder: Path) -> None:
    assert imported(folder).config.chat_template == "{{ messages }}"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=several)
    assert imported(folder).config.chat_template == "d"
    (folder / "chat_template.jinja").write_text("é")
    assert imported(folder).config.chat_template == "é"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert imported(folder).config.chat_template is None


# ------------------------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_folder(hf_model("llama"), tmp_path / "model", max_shard_size="200KB")


def test_shards(shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 2
    equal_weights(imported(shards), hf_model("llama"))


def test_hub_cache_links_are_followed(shards: Path) -> None:
    """The hub's cache keeps blobs elsewhere and links to them."""
    blobs = shards.parent / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(shards.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))
    equal_weights(imported(shards), hf_model("llama"))


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x"]
)
def test_index_stays_in_the_folder(shards: Path, name: str) -> None:
    index = shards / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**mapping, "model.norm.weight": name})
    assert "is not a file name in this folder" in refused(shards)


def test_faulty_shards(shards: Path) -> None:
    shard = sorted(shards.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    assert f"{shard}: not a whole safetensors file" in refused(shards)
    shard.write_bytes(b"")
    assert f"{shard}: not a whole safetensors file" in refused(shards)
    shard.unlink()
    assert f"shard {shard.name} of the index is missing" in refused(shards)
    edit(shards / "model.safetensors.index.json", weight_map=None)
    assert "has no weight_map" in refused(shards)
    (shards / "model.safetensors.index.json").unlink()
    (shards / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled .bin weights are not read" in refused(shards)


# ------------------------------------------------------------------------------- faults


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("model.norm.weight", None, "'model.norm.weight' is missing"),
        ("lm_head.weight", None, "'lm_head.weight' is missing"),
        ("model.x", torch.ones(1), "'model.x' belongs to no layer"),
        ("model.layers.0.self_attn.o_proj.bias", torch.ones(64), "o_proj.bias' belongs to no"),
        ("model.norm.weight", torch.ones(65), "'model.norm.weight' has shape [65]"),
        ("model.norm.weight", torch.ones(64, dtype=torch.float64), "'model.norm.weight' is F64"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), "'model.norm.weight' is I8"),
        ("model.norm.weight", torch.full((64,), float("inf")), "'norm.weight' holds NaN or Inf"),
    ],
)
def test_faulty_tensors(
    folder: Path, name: str, tensor: torch.Tensor | None, expected: str
) -> None:
    change_tensor(folder, name, tensor)
    assert expected in refused(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(architectures=["GemmaForCausalLM"]), "'GemmaForCausalLM' is not supported"),
        (dict(architectures=[3]), "'3' is not supported"),
        (dict(architectures=None, model_type=None), "'None' is not supported"),
        (dict(hidden_act="gelu"), "hidden_act = gelu is not supported"),
        (dict(attention_bias=True), "attention_bias = True is not supported"),
        (dict(mlp_bias=True), "mlp_bias = True is not supported"),
        (dict(use_sliding_window=True), "use_sliding_window = True is not supported"),
        (dict(layer_types=["sliding_attention"] * 4), "sliding_attention in layer_types"),
        (dict(quantization_config={"quant_method": "awq"}), "quantization_config = "),
        (dict(hidden_size=None), "key 'hidden_size' is missing"),
        (dict(hidden_size="64"), "hidden_size is '64', expected a positive integer"),
        (dict(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        (dict(num_attention_heads=0), "num_attention_heads is 0"),
        (dict(num_key_value_heads=3), "config.num_heads: 4 is not a multiple of num_kv_heads"),
        (dict(head_dim=15), "config.head_dim: 15 is not even"),
        (dict(bos_token_id=320), "config.bos_token_id: 320"),
        (dict(eos_token_id=[2, "x"]), "config.eos_token_ids"),
        (dict(vocab_size=300), "'model.embed_tokens.weight' has shape [320, 64]"),
    ],
)
def test_faulty_configurations(folder: Path, changes: dict[str, object], expected: str) -> None:
    edit(folder / "config.json", **changes)
    assert expected in refused(folder)


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_folder(hf_model("llama", vocab_size=300), tmp_path / "model")
    assert "ids up to 319, the model's vocabulary ends at 299" in refused(folder)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff", '{"a": 1}'])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_faulty_json(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(folder)


def test_other_folders(tmp_path: Path) -> None:
    assert "holds no config.json" in refused(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 400) | st.floats() | st.text("a1"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)
KEYS = [
    *SIZES, "head_dim", "rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps",
    "architectures", "model_type", "layer_types", "no_rope_layers", "no_rope_layer_interval",
    "tie_word_embeddings", "hidden_act",
]  # fmt: skip
ROPE_KEYS = ["rope_type", "type", *LLAMA3, "beta_fast", "mscale", "mscale_all_dim", "truncate"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(hf_model("smollm3"), tmp_path_factory.mktemp("hf") / "model")


@pytest.mark.parametrize("factor", [7e305, 10**400, 1e-300])
def test_a_factor_beyond_all_numbers(shared: Path, tmp_path: Path, factor: float) -> None:
    folder = Path(shutil.copytree(shared, tmp_path / "model"))
    record = json.loads((folder / "config.json").read_text())
    record["rope_parameters"] = {**YARN, "rope_theta": 1e4, "factor": factor}
    (folder / "config.json").write_text(json.dumps(record))
    with contextlib.suppress(BadInput):
        assert open_source(folder).fields["max_context"] < 1 << 31


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_configuration_value(shared: Path, data: st.DataObject) -> None:
    """Whatever config.json says: one clear line, or a configuration that fits the weights."""
    file = shared / "config.json"
    original = file.read_text()
    record = copy.deepcopy(json.loads(original))
    if data.draw(st.booleans()):
        record["rope_parameters"] = {**YARN, "rope_theta": 1e4, "mscale": 1, "mscale_all_dim": 1}
        table, keys = record["rope_parameters"], ROPE_KEYS
    else:
        table, keys = record, KEYS
    table[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    file.write_text(json.dumps(record))
    try:
        source = open_source(shared)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert ModelConfig(**source.fields)
    finally:
        file.write_text(original)
