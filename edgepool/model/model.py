"""The whole model: embedding, layers, final norm, LM head; one forward for prefill and decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config import ModelConfig, state_specs
from .layer import Layer, RMSNorm
from .rope import Rotation
from .step import Step

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


class Model(nn.Module):
    """A decoder-only transformer over paged KV (`ModelConfig`).

    Functional: state comes in and goes out, nothing is kept between calls. The exported graph has
    exactly this signature.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.state_names = [spec.name for spec in state_specs(config)]
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotation = Rotation(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Model:
        """A model in eval mode with the checkpoint's weights in `dtype` (shared if equal)."""
        with torch.device("meta"):
            model = cls(checkpoint.config)
        weights = {name: tensor.to(dtype) for name, tensor in checkpoint.weights.items()}
        model.load_state_dict(weights, assign=True)
        return model.requires_grad_(False).eval()

    def forward(
        self,
        input_ids: Tensor,
        page_table: Tensor,
        past_len: Tensor,
        new_len: Tensor,
        logit_rows: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step of S new tokens per sequence.

        input_ids  [B,S] int32, rows at or past new_len are padding
        page_table [B,MP] int32, physical page of each page of a sequence; 0: not allocated
        past_len   [B] int32, tokens already in the pages; new_len [B] int32, real tokens of S
        logit_rows [B,R] int32, the rows of S whose logits are wanted
        state      the tensors of `state_specs(config)`, in order
        Returns (logits [B,R,vocab] float32, *state after the step).
        """
        logits, _, updated = self.forward_layers(
            input_ids, page_table, past_len, new_len, logit_rows, *state
        )
        return (logits, *updated)

    def forward_layers(
        self,
        input_ids: Tensor,
        page_table: Tensor,
        past_len: Tensor,
        new_len: Tensor,
        logit_rows: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`forward` with the layers' outputs: (logits, hidden [B,S,hidden] of each, state)."""
        x = self.embed(input_ids)
        seq = torch.arange(input_ids.shape[1], dtype=torch.int32, device=input_ids.device)
        position = past_len[:, None] + seq
        cos, sin = self.rotation(position)
        step = Step(
            page_table=page_table,
            past_len=past_len,
            new_len=new_len,
            position=position,
            cos=cos.to(x.dtype),
            sin=sin.to(x.dtype),
            state=dict(zip(self.state_names, state)),
            unused=x.new_zeros(1),
            unused_scale=x.new_zeros(1, dtype=torch.float32),
        )
        hidden = []
        for layer in self.layers:
            x = layer(x, step)
            hidden.append(x)
        x = self.norm(_rows(x, logit_rows))
        head = self.embed if self.config.tie_embeddings else self.lm_head
        logits = nn.functional.linear(x, head.weight).float()
        return logits, hidden, [step.state[name] for name in self.state_names]


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[b, rows[b, i]] for [B,S,hidden] and [B,R]: one flat gather, [B,R,hidden]."""
    batch, seq, size = x.shape
    start = torch.arange(batch, dtype=torch.int32, device=x.device)[:, None] * seq
    return nn.functional.embedding(rows + start, x.reshape(batch * seq, size))
