"""What the layers share during one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Step:
    """What all layers of one forward pass share.

    page_table [B,MP], past_len [B], new_len [B], position [B,S] are int32; cos, sin [B,S,1,D];
    state maps the names of `state_specs` to tensors and is updated layer by layer; selected maps
    a layer to the blocks it chose [B,S,Hs,K]; unused [1] stands for an input a mode lacks.
    """

    page_table: Tensor
    past_len: Tensor
    new_len: Tensor
    position: Tensor
    cos: Tensor
    sin: Tensor
    state: dict[str, Tensor]
    unused: Tensor
    unused_scale: Tensor
    selected: dict[int, Tensor] = field(default_factory=dict)

    @property
    def paging(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.page_table, self.past_len, self.new_len
