"""Import a Hugging Face folder: config.json, safetensors (one file or shards), tokenizer.json.

Families: Llama, Qwen2, Qwen3 and SmolLM3 causal language models as `transformers` defines them.
Weights stay mapped from the safetensors files, in the dtype they are stored in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import BadInput
from .hf_config import Table, read_config
from .source import Names, Source, match_weights
from .weights import LazyTensor

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
    if not (path / "config.json").exists():
        raise BadInput(f"{path}: holds no config.json: not a Hugging Face model folder")
    config = _table(path / "config.json")
    family, fields = read_config(config)
    tokenizer = _tokenizer(path)
    settings = _table(path / "tokenizer_config.json")
    fields["bos_token_id"], fields["eos_token_ids"] = _ends(path, config, settings, tokenizer)
    fields["chat_template"] = _chat_template(path, settings)
    found: dict[str, LazyTensor] = {}
    for shard in _shards(path):
        found.update(_tensors(shard))
    for name in list(found):
        computed = name.endswith(".rotary_emb.inv_freq")  # a buffer of transformers before 4.32
        if computed or (name == "lm_head.weight" and fields["tie_embeddings"]):
            del found[name]
    weights = match_weights(path, fields, NAMES, found)
    text = None if tokenizer is None else json.dumps(tokenizer, ensure_ascii=False)
    return Source(path, family.name, fields, weights, text)


def _ends(
    path: Path, config: Table, settings: Table, tokenizer: Optional[dict[str, Any]]
) -> tuple[Any, tuple[Any, ...]]:
    """(BOS id, EOS ids): those of generation and of the model, and the tokenizer's own EOS."""
    generation = _table(path / "generation_config.json")
    ends: list[Any] = []
    for table in (generation, config):
        value = table.values.get("eos_token_id", [])
        ends += value if isinstance(value, list) else [value]
    token = settings.values.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    for added in Table(path, tokenizer or {}).items("added_tokens"):
        if isinstance(added, dict) and added.get("content") == token:
            ends.append(added.get("id"))
    bos = config.values.get("bos_token_id", generation.values.get("bos_token_id"))
    return bos, tuple(end for i, end in enumerate(ends) if end not in ends[:i])


def _tokenizer(path: Path) -> Optional[dict[str, Any]]:
    """tokenizer.json, without the truncation and padding that some are saved with."""
    tokenizer = _json(path / "tokenizer.json")
    if tokenizer is None:
        for name in SLOW_TOKENIZERS:
            if (path / name).exists():
                raise BadInput(
                    f"{path}: has {name} but no tokenizer.json; write one with "
                    "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                )
        return None
    return {**tokenizer, "truncation": None, "padding": None}


def _chat_template(path: Path, settings: Table) -> Any:
    """chat_template.jinja, or the one in tokenizer_config.json (`default` if there are several)."""
    file = path / "chat_template.jinja"
    if file.exists():
        return _text(file)
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        return named.get("default")
    return template


def _shards(path: Path) -> list[Path]:
    """The safetensors files. An index may name files of this folder only."""
    single = path / WEIGHTS
    if single.exists():
        return [single]
    if not (path / INDEX).exists():
        raise BadInput(
            f"{path}: holds neither {WEIGHTS} nor {INDEX} (pickled .bin weights are not read)"
        )
    mapping = _table(path / INDEX).values.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadInput(f"{path}/{INDEX}: has no weight_map")
    shards = []
    for name in sorted(set(map(str, mapping.values()))):
        if name != Path(name).name or "\\" in name:
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
        dtype = DTYPES.get(header.get_dtype())
        if dtype is None:
            raise BadInput(
                f"{shard}: tensor '{name}' is {header.get_dtype()}; "
                f"expected one of {', '.join(DTYPES)}"
            )
        tensors[name] = LazyTensor(tuple(header.get_shape()), dtype, _reader(file, name))
    return tensors


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _table(path: Path) -> Table:
    """The object in a JSON file; empty if there is no such file."""
    return Table(path, _json(path) or {})


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
