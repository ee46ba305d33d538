"""Configurations for `edgepool init`. Holds no torch."""

from __future__ import annotations

from typing import Dict

from ..config import IndexConfig, ModelConfig

# Of the byte-level tokenizer (edgepool.checkpoint.byte_tokenizer), whose ids end at 271.
BOS = END_OF_TEXT = 256
END_OF_TURN = 258

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PRESETS: Dict[str, ModelConfig] = {
    # 12 layers in three groups; the first layer of a group owns the KV that the other three read.
    "edgepool-12l": ModelConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=12,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        max_context=131072,
        rope_theta=1000000.0,
        tie_embeddings=True,
        qk_norm=True,
        layer_types=("window",) * 4 + ("keypoints",) * 4 + ("sparse",) * 4,
        kv_donor=(0,) * 4 + (4,) * 4 + (8,) * 4,
        index=IndexConfig(
            source="learned",
            heads=8,
            dim=64,
            weighting="gate",
            top_k=2048,
            share=(0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8),
        ),
        window=512,
        bos_token_id=BOS,
        eos_token_ids=(END_OF_TURN, END_OF_TEXT),
        chat_template=CHAT_TEMPLATE,
    ),
    # One layer of each kind and a reader: small enough to train and to test on a CPU.
    "edgepool-tiny": ModelConfig(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_context=4096,
        tie_embeddings=True,
        layer_types=("window", "keypoints", "sparse", "sparse"),
        kv_donor=(0, 1, 2, 2),
        index=IndexConfig(
            source="learned",
            heads=4,
            dim=32,
            weighting="gate",
            top_k=64,
            share=(0, 1, 2, 2),
        ),
        window=32,
        bos_token_id=BOS,
        eos_token_ids=(END_OF_TURN, END_OF_TEXT),
        chat_template=CHAT_TEMPLATE,
    ),
}
