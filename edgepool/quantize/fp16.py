"""FP16 judged in PyTorch: every operation's result rounded to FP16, sums in FP32.

ONNX Runtime's CPU computes FP16 nodes in FP32, so it shows neither FP16's error nor its overflow;
here both are seen. As in the exported graph, norms, angles of positions, softmax, index scores and
the sums of products stay FP32 inside, and their results are rounded. What overflows is named as the
graph's node, and stays FP32 from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..bundle import Bundle
from ..model import Model, new_state
from ..model.layer import RMSNorm
from ..model.rope import Rotation
from ..ops.registry import operators
from ..progress import Report, silent
from .compare import Comparison, LayerError
from .linears import groups
from .runner import CHUNK
from .stored import StoredWeights

LARGEST = 65504.0  # of float16
EXACT = (RMSNorm, Rotation)  # FP32 inside

# The ONNX operator that an ATen one becomes, where its name says something else.
NODES = {
    "mm": "MatMul",
    "bmm": "MatMul",
    "addmm": "MatMul",
    "silu": "Mul",
    "embedding": "Gather",
    "index": "Gather",
    "cat": "Concat",
    "native_layer_norm": "LayerNormalization",
    **{op.torch_op._opoverload.overloadpacket.__name__: name for name, op in operators().items()},
}


@dataclass
class Rounding(TorchDispatchMode):
    """Rounds float32 results of operations to float16, except inside `EXACT` modules.

    overflows: node name -> the largest |value| it gave; such results are left as they are.
    """

    overflows: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._scopes: list[str] = [""]
        self._inside_exact = 0
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside_exact or func.is_view or func is torch.ops.aten._unsafe_view.default:
            return result
        name = self._name(func)
        return tree_map(lambda x: self.rounded(x, name), result)

    def rounded(self, x: Any, name: str) -> Any:
        """A float32 tensor rounded to float16; anything else, and what overflows, as it is."""
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        half = x.half().float()
        if bool(half.isinf().any()) and not bool(x.isinf().any()):
            largest = float(x.abs().max())
            self.overflows[name] = max(largest, self.overflows.get(name, 0.0))
            return x
        return half

    def _name(self, func: Any) -> str:
        operation = func.overloadpacket.__name__
        title = NODES.get(operation, "".join(part.title() for part in operation.split("_")))
        key = f"{self._scopes[-1]}/{title}" if self._scopes[-1] else title
        self._counts[key] += 1
        number = self._counts[key]
        return key if number == 1 else f"{key}_{number}"

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Know in which module of the model an operation is, and round what `EXACT` ones give."""
        handles = []
        for path, module in model.named_modules():
            if not path:
                continue

            def enter(module: nn.Module, args: Any, path: str = path) -> None:
                self._scopes.append(path)
                self._inside_exact += isinstance(module, EXACT)

            def leave(module: nn.Module, args: Any, out: Any, path: str = path) -> Any:
                self._scopes.pop()
                if not isinstance(module, EXACT):
                    return out
                self._inside_exact -= 1
                return tree_map(lambda x: self.rounded(x, f"{path}/Mul"), out)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_step(self) -> None:
        """Count nodes from the beginning: the model runs once more."""
        self._counts.clear()


@dataclass(frozen=True)
class Outcome:
    """FP16 against FP32 on a text, and the nodes that have to stay FP32."""

    comparison: Comparison
    overflows: dict[str, float]


def reference_model(bundle: Bundle) -> Model:
    """The PyTorch model that a bundle was exported from, with the weights of its graph."""
    stored = StoredWeights.of(bundle.model_path)
    linears = [linear for group in groups(stored.graph) for linear in group.linears]
    turned_back = {linear.weight for linear in linears if not linear.turned}
    with torch.device("meta"):
        model = Model(bundle.config)
    weights = {}
    for name, _ in model.named_parameters():
        array = np.array(stored.read(name), np.float32)
        weights[name] = torch.from_numpy(array.T.copy() if name in turned_back else array)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def judge(model: Model, ids: np.ndarray, report: Report = silent) -> Outcome:
    """Run the model over a text [n] int32 in FP32 and in FP16, chunk by chunk."""
    config = model.config
    pages = -(-len(ids) // config.page_size)
    table = torch.arange(1, 1 + pages, dtype=torch.int32)[None]
    mode = Rounding()
    half_weights = {name: mode.rounded(x, name) for name, x in model.named_parameters()}
    states = [new_state(config, 1, 1 + pages) for _ in range(2)]
    layers = {f"hidden.{i}": LayerError() for i in range(config.num_layers)}
    result = Comparison(layers=layers)
    for begin in range(0, len(ids), CHUNK):
        part = torch.from_numpy(ids[None, begin : begin + CHUNK].astype(np.int32))
        size = part.shape[1]
        counts = torch.tensor([begin], dtype=torch.int32), torch.tensor([size], dtype=torch.int32)
        step = (part, table, *counts, torch.arange(size, dtype=torch.int32)[None])
        exact, exact_hidden, states[0] = model.forward_layers(*step, *states[0])
        mode.new_step()
        with mode.following(model), mode:
            half, half_hidden, states[1] = _with(model, half_weights, *step, *states[1])
        following = ids[begin + 1 : begin + 1 + size]
        result.add(exact[0].numpy(), half[0].numpy(), following)
        for error, a, b in zip(layers.values(), exact_hidden, half_hidden):
            error.add(a.numpy(), b.numpy())
        report("comparing FP16 with FP32", min(begin + CHUNK, len(ids)), len(ids))
    return Outcome(result, mode.overflows)


def _with(model: Model, weights: dict[str, Tensor], *args: Tensor) -> Any:
    """forward_layers with other weights."""
    own = dict(model.named_parameters())
    model.load_state_dict(weights, assign=True)
    try:
        return model.forward_layers(*args)
    finally:
        model.load_state_dict(own, assign=True)
