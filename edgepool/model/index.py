"""The pooled index of sparse layers, and the fixed rule of keypoints layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from .step import Step


class Index(nn.Module):
    """The pooled index of a sparse layer: writes pooled keys, selects blocks of tokens.

    `keys` pools the attention's own keys per KV head and scores them with its own queries.
    `learned` has one selection head with projections of its own, in the form of GLM-5.3-Flash.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.donor = c.kv_donor[layer]
        heads, queries, dim = c.index_heads
        learned = c.index.source == "learned"
        if learned and c.selects(layer):
            self.q_proj = nn.Linear(c.hidden_size, queries * dim, bias=False)
            self.head_weights = nn.Linear(c.hidden_size, queries, bias=False)
        if not c.owns_index(layer):
            return
        if learned:
            self.k_proj = nn.Linear(c.hidden_size, dim, bias=False)
            self.k_norm = nn.LayerNorm(dim, eps=1e-6)
            if c.index.weighting == "gate":
                self.gate_proj = nn.Linear(c.hidden_size, dim, bias=False)
        if c.index.weighting in ("gate", "query"):
            self.ape = nn.Parameter(torch.zeros(c.index.ratio, heads, dim))
        if c.index.fusion:
            self.fusion = nn.Parameter(torch.eye(dim).expand(heads, dim, dim).clone())

    def write(self, x: Tensor, q: Tensor, k: Tensor, step: Step) -> None:
        """Pool the keys of [B,S] new tokens into the layer's index state."""
        c = self.config
        keys, gates = k, step.unused
        if c.index.source == "learned":
            keys = self.k_norm(self.k_proj(x))[:, :, None]
        if c.index.weighting == "gate":
            gates = self.gate_proj(x)[:, :, None]
        elif c.index.weighting == "query":
            gates = q.unflatten(2, (c.num_kv_heads, c.group_size)).mean(3)
        names = [f"{part}.{self.donor}" for part in ("tail", "index_pool", "index_scale")]
        written = ops.index_pool(
            keys,
            gates,
            self.ape if c.index.weighting != "mean" else step.unused,
            self.fusion if c.index.fusion else step.unused,
            *(step.state.get(name, step.unused_scale) for name in names),
            *step.paging,
            ratio=c.index.ratio,
            weighting=c.index.weighting,
            post_norm=c.index.post_norm,
            fuse=int(c.index.fusion),
            weight_sparsity=c.weight_sparsity,
        )
        for name, tensor in zip(names, written):
            if name in step.state:
                step.state[name] = tensor

    def select(self, x: Tensor, q: Tensor, step: Step) -> Tensor:
        """Score the donor's pools for [B,S] queries; block numbers [B,S,Hs,K] int32."""
        c = self.config
        heads, queries, dim = c.index_heads
        if c.index.source == "keys":
            q, weights = q.unflatten(2, (heads, queries)), step.unused
        else:
            q = self.q_proj(x).unflatten(2, (1, queries, dim))
            weights = self.head_weights(x)[:, :, None] * queries**-0.5
        return ops.index_pool_select(
            q,
            weights,
            step.state[f"index_pool.{self.donor}"],
            step.state.get(f"index_scale.{self.donor}", step.unused_scale),
            *step.paging,
            scoring="softmax" if c.index.source == "keys" else "relu",
            k=c.index.top_blocks,
            block=c.index.block,
            ratio=c.index.ratio,
            window=c.window,
            sinks=c.sinks,
        )


def evenly_spread_blocks(config: ModelConfig, step: Step) -> Tensor:
    """The rule of `keypoints` layers: K blocks spread evenly over what lies before the window.

    With n candidate blocks after the sinks, block j of K is floor(j * max(n, K) / K); those at or
    past n do not exist. It depends on the position alone, so any chunking gives the same blocks.
    Returns [B,S,1,K] int32, -1 where there is none.
    """
    tokens, count = config.index.block_tokens, config.index.top_blocks
    first = config.sinks // tokens
    before_window = (step.position + 1 - config.window).clamp(min=0) // tokens
    candidates = (before_window - first).clamp(min=0)[:, :, None, None]
    rank = torch.arange(count, dtype=torch.int32, device=step.position.device)
    block = rank * candidates.clamp(min=count) // count
    row = torch.arange(step.position.shape[1], dtype=torch.int32, device=step.position.device)
    real = (row < step.new_len[:, None])[:, :, None, None]
    return torch.where(real & (block < candidates), block + first, -1).to(torch.int32)
