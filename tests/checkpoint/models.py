"""Tiny models written as others write them: transformers folders, GGUF files by gguf.GGUFWriter."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

TEXT = (
    "Rows of pages hold keys and values; the index keeps one pooled vector for four of them.\n"
    "\tdef select(blocks, top_k=12): return sorted(blocks)[:top_k]  # it's 3.14159, isn't it?\n"
    "Łódź, Ünïcödé — “quotes” … 漢字かな交じり文 🙂👩‍🚀 naïve café 12345 67890\r\n\r\n   end"
)


def hf_model(family: str, seed: int = 0, **settings: object) -> PreTrainedModel:
    """A random model of the family. Biases and norms are random too, so that none can be lost."""
    config_class, model_class = CLASSES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@functools.cache
def byte_level_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE trained on TEXT by `tokenizers`, with three control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_folder(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """Save model and tokenizer as Hugging Face does; options go to save_pretrained."""
    model.save_pretrained(folder, **options)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter (LlamaModel.permute): rotary halves become pairs."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        stem, leaf = name.rsplit(".", 1)
        stems = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        return f"{stems.get(stem, 'output')}.{leaf}"
    number, rest = name[len("model.layers.") :].split(".", 1)
    part, leaf = rest.rsplit(".", 1)
    return f"blk.{number}.{GGUF_PARTS[part]}.{leaf}"


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    tokenizer: bool = True,
) -> Path:
    """The model as llama.cpp's converter lays it out; matrices in `kind`, vectors in F32.

    `metadata` and `tensors` add to or replace what the converter would write, `drop` leaves out
    metadata keys or tensors.
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    values: dict[str, object] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{family}.attention.key_length": head_dim,
        f"{family}.attention.value_length": head_dim,
        f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{family}.vocab_size": config.vocab_size,
    }
    values.update(metadata or {})
    for key, value in values.items():
        if key not in drop:
            add_value(writer, key, value)
    if tokenizer:
        add_tokenizer(writer, byte_level_tokenizer())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        part = name.split(".")[-2]
        if part in heads and family in ("llama", "smollm3"):
            array = interleaved(array, heads[part])
        name = gguf_name(name)
        if name not in drop and name not in (tensors or {}):
            add_tensor(writer, name, array, kind)
    for name, array in (tensors or {}).items():
        add_tensor(writer, name, array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if array.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    else:
        data = gguf.quantize(np.ascontiguousarray(array, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.update({str: writer.add_string, list: writer.add_array})
    add[type(value)](key, value)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    record = json.loads(tokenizer.to_str())
    vocabulary = sorted(record["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in record["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if i in special else 1 for _, i in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in record["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
