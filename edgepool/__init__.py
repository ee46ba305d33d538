"""edgepool: long-context language models from PyTorch to NVIDIA Jetson, through ONNX and TensorRT.

Importing the package is cheap and needs no torch: every stage is imported where it is used.

    edgepool.checkpoint   model.pt and importers
    edgepool.model        the PyTorch reference model
    edgepool.ops          the custom operators
    edgepool.exporter     ONNX, lowerings, parity
    edgepool.bundle       the folder that is delivered
    edgepool.runtime      sessions and generation
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "export_module"]


def __getattr__(name: str) -> Any:
    if name == "export_module":
        from .exporter import export_module

        return export_module
    raise AttributeError("module 'edgepool' has no attribute '%s'" % name)
