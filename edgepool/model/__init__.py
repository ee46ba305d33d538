"""The PyTorch reference model: what every later stage is compared with."""

from .cache import Cache, new_state
from .model import Model

__all__ = ["Cache", "Model", "new_state"]
