"""The errors a user sees: one line that says what is wrong, where, and what to do.

The command line prints the message and leaves with `exit_code` (docs/commands.md):
1 a gate or check failed, 2 bad input or usage, 3 this machine lacks something.
"""

from __future__ import annotations

# What std::bad_alloc, ONNX Runtime, PyTorch and CUDA say; none of them raises MemoryError.
_OUT_OF_MEMORY = (
    "bad_alloc",
    "bad allocation",
    "failed to allocate",
    "can't allocate memory",
    "out of memory",
)


class EdgepoolError(Exception):
    """Base of every error that is part of the interface; never raised itself."""

    exit_code = 2


class BadInput(EdgepoolError):
    """A file, option or request that cannot be used as it is."""

    exit_code = 2


class GateFailed(EdgepoolError):
    """A parity, accuracy or integrity check found a difference beyond its limit."""

    exit_code = 1


class MissingRequirement(EdgepoolError):
    """This machine lacks a package, tool, device or amount of memory or disk."""

    exit_code = 3


def out_of_memory(failure: Exception) -> bool:
    """Whether an exception of a library says that memory, the machine's or a GPU's, ran out."""
    text = str(failure).lower()
    return isinstance(failure, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)
