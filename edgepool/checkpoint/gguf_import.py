"""Import a GGUF file of the llama, qwen2, qwen3 or smollm3 architecture.

Metadata keys and tensor names: llama.cpp's converter. Float tensors keep their bits; quantised ones
are dequantised and stored as float16, whose rounding (2^-11) is far below their quantisation step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from ..config import MAX_LAYERS, RopeScaling
from ..errors import BadInput
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_tokenizer import build_tokenizer, end_tokens
from .source import Names, Source, match_weights
from .weights import LazyTensor

# Architectures whose converter interleaves the rotary pairs of Q and K (x0 y0 x1 y1 ...).
INTERLEAVED = ("llama", "smollm3")
ARCHITECTURES = (*INTERLEAVED, "qwen2", "qwen3")

# SmolLM3's interval of layers without rotary position; llama.cpp fixes it, no key holds it.
SMOLLM3_INTERVAL = 4

FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
QUANTISED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)

# Keys under the architecture's name that are read, or that do not change the model. Any other may
# change what the model computes, so it is refused.
READ_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
}  # fmt: skip
HARMLESS_KEYS = {"rope.scaling.finetuned", "tensor_data_layout"}
# Keys that are harmless only at the value that switches their feature off.
OFF_KEYS = {
    "expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0,
    "attention.causal": True, "use_parallel_residual": False,
}  # fmt: skip

NAMES = Names(
    "blk",
    {
        "embed": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "attn_norm": "attn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    },
)

CHUNK = 1 << 22  # elements dequantised at a time


def open_gguf(path: Path) -> Source:
    """Read the header; tensors are read when they are written. Raises BadInput."""
    file = GGUFFile(path)
    keys = _Keys(file)
    fields = _fields(keys)
    heads = {"attn_q": fields["num_heads"], "attn_k": fields["num_kv_heads"]}
    found = {}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":  # became fields["rope_scaling"]
            continue
        dtype = _stored(path, tensor)
        part = name.split(".")[-2] if "." in name else name
        turned = heads.get(part) if keys.architecture in INTERLEAVED else None
        found[name] = _lazy(file, tensor, dtype, turned)
    weights = match_weights(path, fields, NAMES, found)
    tokenizer = build_tokenizer(path, file.metadata)
    return Source(path, keys.architecture, fields, weights, tokenizer)


class _Keys:
    """Typed access to the metadata under the architecture's name."""

    def __init__(self, file: GGUFFile):
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise BadInput(
                f"{file.path}: architecture {architecture!r} is not supported "
                f"(supported: {', '.join(ARCHITECTURES)})"
            )
        self.architecture: str = architecture
        if file.metadata.get("split.count", 0) > 1:
            raise BadInput(f"{file.path}: one part of a split model; merge it (llama-gguf-split)")
        for key, value in file.metadata.items():
            if key.startswith(architecture + "."):
                self._check(key, key[len(architecture) + 1 :], value)

    def integer(self, key: str, default: Optional[int] = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(key, value, "one integer")
        return value

    def number(self, key: str, default: Optional[float] = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.bad(key, value, "a number")
        return float(str(np.float32(value)))  # 1e-05 was written, not 9.999999747378752e-06

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def bad(self, key: str, value: Any, expected: str) -> BadInput:
        return BadInput(
            f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected {expected}"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise BadInput(f"{self.file.path}: {self.architecture}.{key} is missing")
        return default if value is None else value

    def _check(self, key: str, short: str, value: Any) -> None:
        if short in READ_KEYS or short in HARMLESS_KEYS:
            return
        if short not in OFF_KEYS or value != OFF_KEYS[short]:
            raise BadInput(
                f"{self.file.path}: {key!r} is {value!r:.40}, which may change the model "
                "and is not supported"
            )


def _fields(keys: _Keys) -> dict[str, Any]:
    file = keys.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadInput(f"{file.path}: tensor 'token_embd.weight' is missing")
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    if heads < 1:
        raise keys.bad("attention.head_count", heads, "a positive integer")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.bad(key, keys.get(key), f"the key length ({head_dim})")
    layers = keys.integer("block_count")
    if not 0 < layers <= MAX_LAYERS:
        raise keys.bad("block_count", layers, f"1 to {MAX_LAYERS}")
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling(keys, head_dim, theta)
    context = keys.integer("context_length")
    if scaling and scaling.kind == "yarn":
        context = max(context, scaling.context)
    smollm3 = keys.architecture == "smollm3"
    interval = SMOLLM3_INTERVAL if smollm3 else layers + 1
    bos, ends = end_tokens(file.path, file.metadata)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_context": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_layers": tuple((i + 1) % interval != 0 for i in range(layers)),
        "tie_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_norm": keys.architecture == "qwen3",
        "bos_token_id": bos,
        "eos_token_ids": ends,
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }


def _scaling(keys: _Keys, head_dim: int, theta: float) -> Optional[RopeScaling]:
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and keys.get("rope.scale_linear"):
        kind = "linear"
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    frequencies = keys.file.tensors.get("rope_freqs.weight")
    if frequencies is not None:
        if kind not in ("none", "linear") or factor != 1.0:
            raise keys.bad("rope.scaling.type", kind, "none beside a rope_freqs tensor")
        return _llama3(keys, frequencies, head_dim, theta)
    if kind == "none":
        return None
    if kind == "linear":
        return None if factor == 1.0 else RopeScaling("linear", factor, original)
    if kind != "yarn":
        raise keys.bad("rope.scaling.type", kind, "none, linear or yarn")
    extra = keys.get("rope.scaling.attn_factor")
    attention = None
    if extra is not None:
        attention = keys.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def _llama3(keys: _Keys, tensor: GGUFTensor, head_dim: int, theta: float) -> Optional[RopeScaling]:
    """The llama3 rule whose divisors the `rope_freqs` tensor lists.

    The file holds the divisor of each frequency, not the rule's parameters. The largest divisor is
    the factor; the rest is 1, 4 and an original context of 8,192 in every published model.
    """
    path = keys.file.path
    if tensor.kind != Kind.F32 or math.prod(tensor.shape) != head_dim // 2:
        raise BadInput(f"{path}: tensor 'rope_freqs.weight' is not {head_dim // 2} F32 numbers")
    divisors = keys.file.rows(tensor, 0, 1).view(np.float32)[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    stated = keys.get("rope.scaling.original_context_length")
    factor = float(divisors.max())
    for original in [8192] if stated is None else [stated, 8192]:
        rule = RopeScaling("llama3", factor, original, low_freq_factor=1.0, high_freq_factor=4.0)
        turns = original / (2 * math.pi) / theta ** (np.arange(0, head_dim, 2) / head_dim)
        blend = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(divisors, 1.0 / (blend + (1.0 - blend) / factor), rtol=1e-4):
            return rule
    raise BadInput(f"{path}: tensor 'rope_freqs.weight' does not follow the llama3 scaling rule")


def _stored(path: Path, tensor: GGUFTensor) -> torch.dtype:
    if tensor.kind in FLOATS:
        return FLOATS[tensor.kind]
    if tensor.kind in QUANTISED:
        return torch.float16
    supported = ", ".join(kind.name for kind in (*FLOATS, *QUANTISED))
    raise BadInput(
        f"{path}: tensor '{tensor.name}' is {tensor.kind.name}, which is not supported "
        f"(supported: {supported})"
    )


def _lazy(
    file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype, heads: Optional[int]
) -> LazyTensor:
    def read() -> Tensor:
        values = _values(file, tensor, dtype)
        return values if heads is None else half_split(values, heads)

    return LazyTensor(tensor.shape, dtype, read)


def _values(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor, dequantised a few rows at a time."""
    width = tensor.shape[-1]
    rows = math.prod(tensor.shape[:-1])
    result = torch.empty((rows, width), dtype=dtype)
    step = max(1, CHUNK // width)
    for start in range(0, rows, step):
        raw = file.rows(tensor, start, min(step, rows - start))
        if tensor.kind in FLOATS:
            part = torch.from_numpy(raw.copy()).view(dtype)
        else:
            part = torch.from_numpy(dequantize(raw, tensor.kind))
        result[start : start + step] = part
    return result.reshape(tensor.shape)


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from interleaved rotary pairs to halves (x0 x1 .. y0 y1 ..)."""
    pairs = weight.shape[0] // heads // 2
    order = weight.reshape(heads, pairs, 2, *weight.shape[1:]).transpose(1, 2)
    return order.reshape(weight.shape)
