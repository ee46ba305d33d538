"""Read the config.json of a Hugging Face causal language model as ModelConfig fields."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from ..config import MAX_LAYERS, RopeScaling
from ..errors import BadInput


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

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class Table:
    """A JSON object with typed access; a null counts as absent. `where` is named in errors."""

    def __init__(self, where: object, values: Mapping[str, Any]):
        self.where = where
        self.values = {key: value for key, value in values.items() if value is not None}

    def integer(self, key: str, default: Optional[int] = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(key, "a positive integer")
        return value

    def number(self, key: str, default: Optional[float] = None) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.bad(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self.bad(key, "a list")
        return value

    def bad(self, key: str, expected: str) -> BadInput:
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return BadInput(f"{self.where}: {key} is {shown}, expected {expected}")

    def _get(self, key: str, default: Any) -> Any:
        if key in self.values:
            return self.values[key]
        if default is None:
            raise BadInput(f"{self.where}: key '{key}' is missing")
        return default


def read_config(config: Table) -> tuple[Family, dict[str, Any]]:
    """The family, and ModelConfig fields but for tokens; raises BadInput for what they lack."""
    family = _family(config)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    layers, context = config.integer("num_hidden_layers"), config.integer("max_position_embeddings")
    if layers > MAX_LAYERS:
        raise config.bad("num_hidden_layers", f"at most {MAX_LAYERS}")
    theta, scaling = _rope(config, family, context)
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, scaling.context)
    return family, {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", family.head_dim or hidden // heads),
        "max_context": context,
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_layers": _rope_layers(config, family, layers),
        "tie_embeddings": config.flag("tie_word_embeddings", family.tie_embeddings),
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
    }


def _family(config: Table) -> Family:
    names = config.items("architectures") or [config.values.get("model_type")]
    by_type = {family.name: family for family in FAMILIES.values()}
    name = str(names[0])
    family = FAMILIES.get(name) or by_type.get(name)
    if family is None:
        raise BadInput(
            f"{config.where}: architecture {name!r} is not supported "
            f"(supported: {', '.join(FAMILIES)})"
        )
    for key, fine in UNSUPPORTED.items():
        if config.values.get(key, fine) != fine:
            raise BadInput(
                f"{config.where}: {key} = {str(config.values[key])[:40]} is not supported"
            )
    for kind in config.items("layer_types"):
        if kind != "full_attention":
            raise BadInput(f"{config.where}: {kind} in layer_types is not supported")
    return family


def _rope(config: Table, family: Family, context: int) -> tuple[float, Optional[RopeScaling]]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    values = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise BadInput(f"{config.where}: the rope parameters are not a table")
    rope = Table(config.where, values)
    theta = rope.number("rope_theta", config.number("rope_theta", family.rope_theta))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.bad("partial_rotary_factor", "1.0 (partial rotation is not supported)")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise BadInput(
            f"{config.where}: rope scaling {kind!r} is not supported "
            f"(supported: {', '.join(ROPE_KINDS)})"
        )
    if kind == "default":
        return theta, None
    factor = rope.number("factor")
    original = rope.integer("original_max_position_embeddings", context)
    if kind == "linear":
        return theta, RopeScaling("linear", factor, original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return theta, RopeScaling(
            "llama3", factor, original, low_freq_factor=low, high_freq_factor=high
        )
    return theta, RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: Table, factor: float) -> Optional[float]:
    """YaRN's factor on cos and sin when the source states it, directly or by two `mscale`s."""
    if "attention_factor" in rope.values:
        return rope.number("attention_factor")
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    above, below = rope.number("mscale"), rope.number("mscale_all_dim")
    return (growth * above + 1.0) / (growth * below + 1.0)


def _rope_layers(config: Table, family: Family, layers: int) -> tuple[bool, ...]:
    """Which layers rotate: all, but for SmolLM3 (`no_rope_layers` holds 1 where a layer does)."""
    if family.name != "smollm3":
        return (True,) * layers
    listed = config.items("no_rope_layers")
    if not listed:
        interval = config.integer("no_rope_layer_interval", 4)
        listed = [(i + 1) % interval for i in range(layers)]
    if len(listed) < layers:
        raise config.bad("no_rope_layers", f"an entry for each of {layers} layers")
    return tuple(bool(rotates) for rotates in listed[:layers])
