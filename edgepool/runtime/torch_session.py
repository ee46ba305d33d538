"""A session on PyTorch: the reference model, eager. The only runtime module that needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from .session import Session, physical_pages

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


def open_session(
    checkpoint: Checkpoint,
    batch: int = 1,
    capacity: Optional[int] = None,
    chunk: int = 256,
    threads: int = 0,
) -> Session:
    """A session over the weights of a `model.pt`, computed in FP32.

    The weights stay mapped in the dtype they are stored in, so that memory holds the file, one
    widened matrix and the cache. capacity and chunk as in `ort_session.open_session`; threads 0: as
    torch chooses.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    config = checkpoint.config
    capacity = config.max_context if capacity is None else capacity
    pages = physical_pages(config, batch, capacity)
    return Session(config, TorchBackend(checkpoint, batch, pages), batch, capacity, chunk)


class TorchBackend:
    """Runs steps of the reference model (`session.Backend`); every step copies the state."""

    def __init__(self, checkpoint: Checkpoint, batch: int, pages: int) -> None:
        import torch

        from ..model import Model, new_state

        with torch.device("meta"):
            model = Model(checkpoint.config)
        weights = {n: x if x.dim() == 2 else x.float() for n, x in checkpoint.weights.items()}
        model.load_state_dict(weights, assign=True)
        self._model = model.requires_grad_(False).eval()
        self.state = new_state(checkpoint.config, batch, pages)
        self.cache_bytes = sum(t.numel() * t.element_size() for t in self.state)

    def step(
        self,
        input_ids: np.ndarray,
        page_table: np.ndarray,
        past_len: np.ndarray,
        new_len: np.ndarray,
        logit_rows: np.ndarray,
        read: bool = True,
    ) -> np.ndarray:
        import torch

        arrays = (input_ids, page_table, past_len, new_len, logit_rows)
        with torch.inference_mode(), _widening():
            logits, *self.state = self._model(*map(torch.from_numpy, arrays), *self.state)
        return logits.numpy()

    def close(self) -> None:
        self.state.clear()
        del self._model


def _widening() -> Any:
    """A context in which matrices of any float type are taken for FP32, one at a time."""
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    class Widening(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is functional.linear:
                x, weight, *rest = args
                args = (x, weight.float(), *rest)
            result = func(*args, **(kwargs or {}))
            return result.float() if func is functional.embedding else result

    return Widening()
