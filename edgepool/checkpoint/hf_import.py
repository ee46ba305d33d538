"""Import a Hugging Face folder: config.json, safetensors (one file or shards), tokenizer.json.

Families: Llama, Qwen2, Qwen3 and SmolLM3 causal language models as `transformers` defines them.
Weights stay mapped from the safetensors files, in the dtype they are stored in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import RopeScaling
from ..errors import BadInput
from .source import Names, Source, match_weights
from .weights import LazyTensor


@dataclass(frozen=True)
class Family:
    """What `transformers` takes for granted when config.json leaves it out."""

    name: str
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    head_dim: Optional[int] = None
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", head_dim=128, qk_norm=True),
    "SmolLM3ForCausalLM": Family("smollm3", tie_embeddings=True, rope_theta=2000000.0),
}

# Settings that change the model in a way that ModelConfig cannot say, and the value that is fine.
UNSUPPORTED = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "quantization_config": None,
}  # fmt: skip

NAMES = Names(
    "model.layers",
    {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "lm_head": "lm_head",
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    },
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_folder(path: Path) -> Source:
    """Read the configuration and the safetensors headers. Raises BadInput."""
    config = _config(path)
    family = _family(path, config)
    tokenizer = _tokenizer(path)
    fields = _fields(path, config, family)
    fields["bos_token_id"], fields["eos_token_ids"] = _ends(path, config, tokenizer or {})
    fields["chat_template"] = _chat_template(path)
    found = {}
    for shard in _shards(path):
        found.update(_tensors(shard))
    for name in list(found):
        computed = name.endswith(".rotary_emb.inv_freq")  # buffers of transformers before 4.32
        if computed or (name == "lm_head.weight" and fields["tie_embeddings"]):
            del found[name]
    weights = match_weights(path, fields, NAMES, found)
    text = None if tokenizer is None else json.dumps(tokenizer, ensure_ascii=False)
    return Source(path, family.name, fields, weights, text)


def _config(path: Path) -> dict[str, Any]:
    config = _json(path / "config.json")
    if config is None:
        raise BadInput(f"{path}: holds no config.json: not a Hugging Face model folder")
    return {key: value for key, value in config.items() if value is not None}


def _family(path: Path, config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type")]
    by_type = {family.name: family for family in FAMILIES.values()}
    family = FAMILIES.get(names[0], by_type.get(names[0])) if isinstance(names, list) else None
    if family is None:
        raise BadInput(
            f"{path}/config.json: architecture {names!r} is not supported "
            f"(supported: {', '.join(FAMILIES)})"
        )
    for key, fine in UNSUPPORTED.items():
        if config.get(key, fine) != fine:
            raise BadInput(f"{path}/config.json: {key} = {str(config[key])[:40]} is not supported")
    for kind in config.get("layer_types", ()):
        if kind != "full_attention":
            raise BadInput(f"{path}/config.json: {kind} in layer_types is not supported")
    return family


def _fields(path: Path, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    def need(key: str) -> Any:
        if key not in config:
            raise BadInput(f"{path}/config.json: key '{key}' is missing")
        return config[key]

    def integer(key: str) -> int:
        value = need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{path}/config.json: {key} is {value!r}, expected a positive integer")
        return value

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    layers, context = integer("num_hidden_layers"), integer("max_position_embeddings")
    theta, scaling = _rope(path, config, family, context)
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, int(scaling.factor * scaling.original_max_context))
    return {
        "vocab_size": integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", family.head_dim or hidden // heads),
        "max_context": context,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_layers": _rope_layers(path, config, family, layers),
        "tie_embeddings": config.get("tie_word_embeddings", family.tie_embeddings),
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
    }


def _rope(
    path: Path, config: Mapping[str, Any], family: Family, context: int
) -> tuple[float, Optional[RopeScaling]]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    where = f"{path}/config.json"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise BadInput(f"{where}: the rope parameters are not a table")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope.get("rope_theta", config.get("rope_theta", family.rope_theta))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadInput(f"{where}: partial_rotary_factor is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise BadInput(
            f"{where}: rope scaling {kind!r} is not supported (supported: linear, llama3, yarn)"
        )
    keys = ["factor"]
    keys += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
    for key in keys:
        if key not in rope:
            raise BadInput(f"{where}: rope scaling {kind!r} lacks '{key}'")
    options = ("beta_fast", "beta_slow", "truncate") if kind == "yarn" else tuple(keys[1:])
    scaling = RopeScaling(
        kind,
        rope["factor"],
        rope.get("original_max_position_embeddings", context),
        attention_factor=_attention_factor(where, rope) if kind == "yarn" else None,
        **{key: rope[key] for key in options if key in rope},
    )
    return theta, scaling


def _attention_factor(where: str, rope: Mapping[str, Any]) -> Optional[float]:
    """YaRN's factor on cos and sin when the source states it, directly or by two `mscale`s."""
    if "attention_factor" in rope or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return rope.get("attention_factor")
    try:
        growth = 0.1 * math.log(rope["factor"]) if rope["factor"] > 1 else 0.0
        return (growth * rope["mscale"] + 1.0) / (growth * rope["mscale_all_dim"] + 1.0)
    except TypeError:
        raise BadInput(f"{where}: mscale, mscale_all_dim and factor must be numbers") from None


def _rope_layers(
    path: Path, config: Mapping[str, Any], family: Family, layers: int
) -> tuple[bool, ...]:
    """Which layers rotate: all, but for SmolLM3 (`no_rope_layers` holds 1 where a layer does)."""
    if family.name != "smollm3":
        return (True,) * layers
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.get("no_rope_layer_interval", 4)
        listed = [(i + 1) % interval for i in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers:
        raise BadInput(f"{path}/config.json: no_rope_layers does not list {layers} layers")
    return tuple(bool(rotates) for rotates in listed[:layers])


def _ends(
    path: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> tuple[Optional[int], tuple[int, ...]]:
    """(BOS id, EOS ids): those of generation, of the model, and the tokenizer's own EOS."""
    generation = _json(path / "generation_config.json") or {}
    ends: list[int] = []
    for record in (generation, config):
        value = record.get("eos_token_id")
        ends += value if isinstance(value, list) else [] if value is None else [value]
    token = (_json(path / "tokenizer_config.json") or {}).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = tokenizer.get("added_tokens", ())
    ends += [entry["id"] for entry in added if entry.get("content") == token]
    return config.get("bos_token_id", generation.get("bos_token_id")), tuple(dict.fromkeys(ends))


def _tokenizer(path: Path) -> Optional[dict[str, Any]]:
    """tokenizer.json, without the truncation and padding that some are saved with."""
    record = _json(path / "tokenizer.json")
    if record is None:
        for name in SLOW_TOKENIZERS:
            if (path / name).exists():
                raise BadInput(
                    f"{path}: has {name} but no tokenizer.json; write one with "
                    "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                )
        return None
    return {**record, "truncation": None, "padding": None}


def _chat_template(path: Path) -> Optional[str]:
    """chat_template.jinja, or the one in tokenizer_config.json (`default` if there are several)."""
    file = path / "chat_template.jinja"
    if file.exists():
        return _text(file)
    template = (_json(path / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        return named.get("default")
    return template


def _shards(path: Path) -> list[Path]:
    """The safetensors files. An index may name files of this folder only."""
    single = path / WEIGHTS
    if single.exists():
        return [single]
    index = _json(path / INDEX)
    if index is None:
        raise BadInput(
            f"{path}: holds neither {WEIGHTS} nor {INDEX} (pickled .bin weights are not read)"
        )
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadInput(f"{path}/{INDEX}: has no weight_map")
    shards = []
    for name in dict.fromkeys(mapping.values()):
        if not isinstance(name, str) or name != Path(name).name or "\\" in name:
            raise BadInput(f"{path}/{INDEX}: shard {name!r} is not a file name in this folder")
        if not (path / name).is_file():
            raise BadInput(f"{path}: shard {name} of the index is missing")
        shards.append(path / name)
    return shards


def _tensors(shard: Path) -> dict[str, LazyTensor]:
    try:
        file = safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{shard}: not a whole safetensors file: {error}") from error
    tensors = {}
    for name in file.keys():  # noqa: SIM118 (not a dict)
        header = file.get_slice(name)
        if header.get_dtype() not in DTYPES:
            raise BadInput(
                f"{shard}: tensor '{name}' is {header.get_dtype()}; "
                f"expected one of {', '.join(DTYPES)}"
            )
        shape = tuple(header.get_shape())
        tensors[name] = LazyTensor(shape, DTYPES[header.get_dtype()], _reader(file, name))
    return tensors


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        return file.get_tensor(name)

    return read


def _json(path: Path) -> Optional[dict[str, Any]]:
    """The object in a JSON file, or None if there is no such file."""
    if not path.exists():
        return None
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
