"""PyTorch to ONNX: bundles of models, files of any module; each is compared with PyTorch."""

from .module import export_module

__all__ = ["export_module"]
