"""One decoder layer: attention over the shared KV pool, then the feed-forward network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from .index import Index, evenly_spread_blocks
from .rope import rotate
from .step import Step


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in FP32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Layer(nn.Module):
    """x + attend(norm(x)), then x + feed_forward(norm(x)); [B,S,hidden] -> [B,S,hidden].

    A donor layer writes its keys and values into its pages and attends; a reader (`kv_donor`)
    attends over its donor's pages with queries of its own.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.kind = c.layer_types[layer]
        self.donor = c.kv_donor[layer]
        self.writes = c.is_donor(layer)
        self.rotary = c.rope_layers[layer]
        kv_width = c.num_kv_heads * c.head_dim
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        if self.writes:
            self.k_proj = nn.Linear(c.hidden_size, kv_width, bias=c.qkv_bias)
            self.v_proj = nn.Linear(c.hidden_size, kv_width, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            if self.writes:
                self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        if c.selects(layer) or c.owns_index(layer):
            self.index = Index(c, layer)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attend(self.attn_norm(x), step)
        return x + self.feed_forward(self.mlp_norm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def attend(self, x: Tensor, step: Step) -> Tensor:
        """Grouped-query attention of [B,S,hidden] over the layer's pages, updated first."""
        c = self.config
        q = self.q_proj(x).unflatten(2, (c.num_heads, c.head_dim))
        q = self.q_norm(q) if c.qk_norm else q
        if not self.writes:
            q = rotate(q, step.cos, step.sin) if self.rotary else q
            out = ops.shared_kv_read(
                q, *self._pages(step), *step.paging, self._select(x, q, step), *self._span()
            )
            return self.o_proj(out.flatten(2))

        k = self.k_proj(x).unflatten(2, (c.num_kv_heads, c.head_dim))
        k = self.k_norm(k) if c.qk_norm else k
        v = self.v_proj(x).unflatten(2, (c.num_kv_heads, c.head_dim))
        if self.rotary:  # queries and keys together: half as many operations
            placed = rotate(torch.cat([q, k], 2), step.cos, step.sin)
            q, k = placed.split([c.num_heads, c.num_kv_heads], 2)
        if c.owns_index(self.layer):
            self.index.write(x, q, k, step)
        selected = self._select(x, q, step)
        out, *pages = ops.shared_kv_attention(
            q, k, v, *self._pages(step), *step.paging, selected, *self._span()
        )
        for name, tensor in zip(self._page_names(), pages):
            if name in step.state:
                step.state[name] = tensor
        return self.o_proj(out.flatten(2))

    def _page_names(self) -> list[str]:
        return [f"{part}.{self.donor}" for part in ("k_pool", "v_pool", "k_scale", "v_scale")]

    def _pages(self, step: Step) -> list[Tensor]:
        return [step.state.get(name, step.unused_scale) for name in self._page_names()]

    def _span(self) -> tuple[int, int, int, float, int]:
        """window, sinks, block_tokens, scale, select: the attributes of the attention operators."""
        c = self.config
        scale = c.head_dim**-0.5
        if self.kind == "full":
            return 0, 0, c.page_size, scale, 0
        if self.kind == "window":
            return c.window, c.sinks, c.page_size, scale, 0
        return c.window, c.sinks, c.index.block_tokens, scale, 1

    def _select(self, x: Tensor, q: Tensor, step: Step) -> Tensor:
        """The blocks each query attends to beside sinks and window: [B,S,Hs,K] int32."""
        if self.kind == "keypoints":
            if -1 not in step.selected:
                step.selected[-1] = evenly_spread_blocks(self.config, step)
            return step.selected[-1]
        if self.kind == "sparse":
            if self.config.selects(self.layer):
                step.selected[self.layer] = self.index.select(x, q, step)
            return step.selected[self.config.index.share[self.layer]]
        return torch.full((1,), -1, dtype=torch.int32, device=x.device)
