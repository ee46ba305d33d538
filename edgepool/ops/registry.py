"""What an operator is, and the table of them.

An operator's module registers one `Operator`; everything that has to know all operators (function
attachment, schemas, the generated documentation, tests) asks `operators()`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .body import Body

DOMAIN = "edgepool"
VERSION = 1

# Sizes that may change from call to call; every other size is fixed where an operator is used.
DYNAMIC_SIZES = ("B", "S", "MP", "NP")


@dataclass(frozen=True)
class Argument:
    """An input or output tensor.

    type   `T` (float32 or float16, one per node), `P` (T, or int8), `float32` or `int32`
    shape  per axis a number, a size by name, or the attribute that gives it
    unused when the tensor is not used, and a constant of shape [1] is passed instead
    """

    name: str
    type: str
    shape: tuple[int | str, ...]
    text: str
    unused: str = ""


PAGING = (
    Argument("page_table", "int32", ("B", "MP"), "physical page of each logical page; 0: none."),
    Argument("past_len", "int32", ("B",), "tokens before this step."),
    Argument("new_len", "int32", ("B",), "real tokens among the S rows of this step, from row 0."),
)


@dataclass(frozen=True)
class Attribute:
    """A required attribute: `kind` is int, float or str; `choices` the strings it may be."""

    name: str
    kind: type
    text: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator: its PyTorch definition, its ONNX schema and its body in standard operators.

    body(graph, site, form) adds nodes to `graph`, in which the inputs have their names, and returns
    the names of the values that are the outputs.
    """

    name: str
    torch_op: Any
    text: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[[Body, Site, str], Sequence[str]]


@dataclass(frozen=True)
class Site:
    """What is fixed where an operator is used; its function body is written for exactly this.

    activation, storage: ONNX element types of T and P; values: attributes and fixed sizes.
    """

    activation: int
    storage: int
    values: tuple[tuple[str, int | float | str], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.values)[name]


_operators: dict[str, Operator] = {}


def register(operator: Operator) -> None:
    """Add an operator to the table; called once by its module."""
    if operator.name in _operators:
        raise ValueError(f"operator {operator.name} is registered twice")
    _operators[operator.name] = operator


def operators() -> dict[str, Operator]:
    """Every operator of the package by ONNX name, in alphabetical order."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "document":  # a command
            importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_operators.items()))
