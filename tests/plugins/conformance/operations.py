"""The operators under test: random cases, what their definition gives, and how near is near enough.

Cases and comparisons are those of the kernels' own tests; here they go through the plugins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from edgepool.ops.registry import DYNAMIC_SIZES, Operator, operators
from tests.plugins import shared_kv
from tests.plugins import test_index_pool_kernel as pool
from tests.plugins import test_index_pool_select_kernel as select

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Operation:
    """One operator. `example` is a case for tests that need one; inputs() gives its tensors by
    name, and more than the operator takes; check() compares outputs by name with the definition's.
    """

    name: str
    cases: st.SearchStrategy[Any]
    example: Any
    attributes: Callable[[Any], dict[str, Any]]
    inputs: Callable[[Any], Arrays]
    check: Callable[[Any, Arrays, Arrays, Arrays], None]  # case, inputs, got, expected

    @property
    def operator(self) -> Operator:
        return operators()[self.name]

    def tensors(self, case: Any) -> Arrays:
        """The operator's inputs, in order."""
        data = self.inputs(case)
        return {a.name: data[a.name] for a in self.operator.inputs}

    def define(self, case: Any, data: Arrays) -> Arrays:
        """What the PyTorch definition gives, by name of the output."""
        tensors = [torch.from_numpy(a.copy()) for a in data.values()]
        made = self.operator.torch_op(*tensors, **self.attributes(case))
        made = (made,) if isinstance(made, torch.Tensor) else made
        return {a.name: t.numpy() for a, t in zip(self.operator.outputs, made)}

    def like(self, case: Any, data: Arrays) -> Arrays:
        """Arrays of the shapes and types of the outputs, by the definition's fake kernel."""
        tensors = [torch.from_numpy(a).to("meta") for a in data.values()]
        made = self.operator.torch_op(*tensors, **self.attributes(case))
        made = (made,) if isinstance(made, torch.Tensor) else made
        return {
            a.name: np.empty(tuple(t.shape), str(t.dtype).split(".")[1])
            for a, t in zip(self.operator.outputs, made)
        }

    def aliases(self) -> list[int]:
        """For each output, the input that it is the new state of; -1: it is no state."""
        names = [a.name for a in self.operator.inputs]
        states = [a.name[: -len("_out")] for a in self.operator.outputs]
        return [
            names.index(s) if a.name.endswith("_out") and s in names else -1
            for a, s in zip(self.operator.outputs, states)
        ]

    def varying(self, data: Arrays) -> list[list[int]]:
        """For each input, the axes whose size may change from call to call."""
        axes = []
        for argument, array in zip(self.operator.inputs, data.values()):
            used = len(argument.shape) == array.ndim
            axes.append(
                [i for i, size in enumerate(argument.shape) if used and size in DYNAMIC_SIZES]
            )
        return axes


def _pool_attributes(case: pool.Case) -> dict[str, Any]:
    return {
        "ratio": case.ratio,
        "weighting": case.weighting,
        "post_norm": case.post_norm,
        "fuse": case.fuse,
        "weight_sparsity": case.sparsity,
    }


def _select_attributes(case: select.Case) -> dict[str, Any]:
    names = ("scoring", "k", "block", "ratio", "window", "sinks")
    return {name: getattr(case, name) for name in names}


def _attention_attributes(case: shared_kv.Case) -> dict[str, Any]:
    names = ("window", "sinks", "block_tokens", "scale", "select")
    return dict(zip(names, shared_kv.attributes(case)))


def _check_pool(case: pool.Case, data: Arrays, got: Arrays, want: Arrays) -> None:
    names = ("tail_out", "index_pool_out", "index_scale_out")
    pool.assert_same(case, *(tuple(a[n] for n in names) for a in (got, want)))  # type: ignore[arg-type]


def _check_select(case: select.Case, data: Arrays, got: Arrays, want: Arrays) -> None:
    select.assert_best(got["selected"], select.float64_scores(case, data), case.exact)


def _check_attention(case: shared_kv.Case, data: Arrays, got: Arrays, want: Arrays) -> None:
    state = {n: data[n] for n in shared_kv.STATE}
    results = []
    for outputs in (got, want):
        written = {n: outputs[n + "_out"] for n in shared_kv.STATE if n + "_out" in outputs}
        results.append({"out": outputs["out"], **state, **written})
    shared_kv.assert_same(case, *results)


def _read_inputs(case: shared_kv.Case) -> Arrays:
    """Pages as a donor layer left them, which a reader asks with queries of its own."""
    data = shared_kv.inputs(case)
    written = shared_kv.define(case, data)
    data.update({name: written[name] for name in shared_kv.STATE})
    data["q"] = data["q"][..., ::-1].copy()
    return data


_attention = dict(
    cases=shared_kv.cases(),
    example=shared_kv.Case(batch=2, length=3, group=2, columns=6, seed=1),
    attributes=_attention_attributes,
    check=_check_attention,
)
OPERATIONS = {
    o.name: o
    for o in (
        Operation(
            "IndexPool", pool.cases(), pool.Case(length=9, quantised=True, fuse=1, seed=1),
            _pool_attributes, pool.inputs, _check_pool,
        ),
        Operation(
            "IndexPoolSelect", select.cases(), select.Case(batch=2, length=3, heads=2, seed=1),
            _select_attributes, select.inputs, _check_select,
        ),
        Operation("SharedKVAttention", inputs=shared_kv.inputs, **_attention),  # type: ignore[arg-type]
        Operation("SharedKVRead", inputs=_read_inputs, **_attention),  # type: ignore[arg-type]
    )
}  # fmt: skip


def with_types(case: Any, activation: type, quantised: bool) -> Any:
    """The case in other types."""
    return dataclasses.replace(case, activation=activation, quantised=quantised)
