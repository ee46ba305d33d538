"""The imported model against transformers' own implementations of the same families."""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch
from tokenizers import Tokenizer

from edgepool.checkpoint import Retrofit, import_checkpoint, load
from edgepool.model import Cache, Model
from tests.checkpoint.models import hf_model, write_folder, write_gguf

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {}),
}
FULL = Retrofit(attention="full")


def our_logits(path, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits [B,S,vocab] of a model.pt, fed `chunk` tokens at a time."""
    model = Model.from_checkpoint(load(path))
    cache = Cache.allocate(model, len(ids), ids.shape[1])
    return torch.cat([cache.step(part.tolist()) for part in ids.split(chunk, 1)], 1)


@pytest.mark.parametrize("case", CASES)
def test_full_attention_equals_transformers(case, tmp_path):
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    import_checkpoint(write_folder(theirs, tmp_path / "hf"), tmp_path / "model.pt", FULL)
    ids = torch.randint(3, 320, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids).logits
    torch.testing.assert_close(our_logits(tmp_path / "model.pt", ids, 77), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_same_model_as_the_folder(case, tmp_path):
    family, settings = CASES[case]
    theirs = hf_model(family, **settings)
    import_checkpoint(write_gguf(theirs, tmp_path / "m.gguf"), tmp_path / "model.pt", FULL)
    ids = torch.randint(3, 320, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids).logits
    torch.testing.assert_close(our_logits(tmp_path / "model.pt", ids, 60), want, rtol=0, atol=1e-4)


def test_a_budget_that_covers_the_context_is_full_attention(tmp_path):
    """With room for every block, selection leaves nothing out: sparse must equal full."""
    theirs = hf_model("llama")
    folder = write_folder(theirs, tmp_path / "hf")
    import_checkpoint(folder, tmp_path / "sparse.pt", Retrofit(budget=512, window=32))
    ids = torch.randint(3, 320, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids).logits
    torch.testing.assert_close(our_logits(tmp_path / "sparse.pt", ids, 50), want, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- the real model, real text

TOKENS, CHUNK = 4096, 512


def english(tokenizer: str) -> torch.Tensor:
    """The first 4,096 tokens of Python's own documentation topics, [1, 4096]."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([Tokenizer.from_str(tokenizer).encode(text).ids[:TOKENS]])


def perplexity(path) -> float:
    checkpoint = load(path)
    ids = english(checkpoint.tokenizer)
    cache = Cache.allocate(Model.from_checkpoint(checkpoint), 1, TOKENS)
    loss, count = 0.0, 0
    for start in range(0, TOKENS, CHUNK):
        logits = cache.step(ids[:, start : start + CHUNK].tolist())[0]
        target = ids[0, start + 1 : start + 1 + CHUNK]
        loss += torch.nn.functional.cross_entropy(
            logits[: len(target)], target, reduction="sum"
        ).item()
        count += len(target)
    return float(torch.tensor(loss / count).exp())


def transformers_perplexity(path) -> float:
    """The weights of a model.pt (full attention) in transformers' LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = load(path)
    c = checkpoint.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.max_context,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    parts = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{p: f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{p: f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for i in range(c.num_layers):
        for ours, name in parts.items():
            names[f"layers.{i}.{ours}.weight"] = f"model.layers.{i}.{name}.weight"
    state = {names[name]: weight.float() for name, weight in checkpoint.weights.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    ids = english(checkpoint.tokenizer)
    with torch.no_grad():
        loss = theirs(ids, labels=ids).loss
    return float(loss.exp())


@pytest.mark.slow
def test_perplexity_of_smollm2(smollm2_gguf, tmp_path, record_property):
    """`full` equals transformers within 0.1 %, `sparse` at 1,024 tokens is within 3 % of `full`."""
    import_checkpoint(smollm2_gguf, tmp_path / "full.pt", FULL)
    import_checkpoint(smollm2_gguf, tmp_path / "sparse.pt", Retrofit(budget=1024))
    full, sparse = perplexity(tmp_path / "full.pt"), perplexity(tmp_path / "sparse.pt")
    theirs = transformers_perplexity(tmp_path / "full.pt")
    print(f"perplexity: transformers {theirs:.4f}, full {full:.4f}, sparse {sparse:.4f}")
    record_property("perplexity", f"{theirs:.4f} {full:.4f} {sparse:.4f}")
    assert full == pytest.approx(theirs, rel=1e-3)
    assert sparse <= full * 1.03
