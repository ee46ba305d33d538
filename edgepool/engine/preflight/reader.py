"""Who will read the graph: a version of TensorRT's parser, TensorRT-RTX or ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import FrozenSet, Iterable, Tuple

from ...resources import resource
from ...targets import Target

# The newest opset by the version that brought it (onnx-tensorrt's docs/operators.md of each).
TENSORRT_OPSETS = (((10, 15), 24), ((10, 6), 22), ((10, 0), 20), ((8, 5), 17))
RTX_OPSET = 24
ONNXRUNTIME_OPSETS = (((1, 19), 21),)
ONNXRUNTIME_IR = 10  # of ONNX Runtime 1.19


@dataclass(frozen=True)
class Reader:
    """What the rules ask about a target.

    kind        `tensorrt`, `rtx` or `onnxruntime`
    operators   standard operators that the parser knows; empty if it knows all
    plugins     operators that a plugin library registers
    calibrator  the build would also be given an INT8 calibrator or calibration cache
    """

    target: Target
    kind: str
    version: Tuple[int, ...]
    operators: FrozenSet[str]
    plugins: FrozenSet[str]
    calibrator: bool = False

    @property
    def name(self) -> str:
        titles = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX", "onnxruntime": "ONNX Runtime"}
        return "%s %s" % (titles[self.kind], ".".join(map(str, self.version)))

    @property
    def parses(self) -> bool:
        """Whether it is one of TensorRT's parsers."""
        return self.kind != "onnxruntime"

    @property
    def newest_opset(self) -> int:
        if self.kind == "rtx":
            return RTX_OPSET
        known = TENSORRT_OPSETS if self.kind == "tensorrt" else ONNXRUNTIME_OPSETS
        return next((opset for version, opset in known if self.version >= version), known[-1][1])

    def before(self, *version: int) -> bool:
        """Whether it is a TensorRT older than that; TensorRT-RTX is as new as TensorRT 10.15."""
        return self.kind == "tensorrt" and self.version < version

    def has_plugin(self, op_type: str) -> bool:
        """Whether a plugin is registered: of ours, named by the user, or of NVIDIA's library."""
        ours = self.target.runs_plugins and _plain(op_type) in map(_plain, our_plugins())
        return ours or op_type in self.plugins or op_type.endswith("_TRT")


def reader_of(target: Target, plugins: Iterable[str] = (), calibrator: bool = False) -> Reader:
    """The reader of a target; plugins: operators that the user's own libraries register."""
    kinds = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx", "onnxruntime": "onnxruntime"}
    key = next(key for key in kinds if key in target.software)
    version = tuple(int(x) for x in target.software[key].split("."))
    operators = frozenset(known_operators(target.operators) if target.operators else ())
    return Reader(target, kinds[key], version, operators, frozenset(plugins), calibrator)


def known_operators(name: str) -> Iterable[str]:
    """The standard operators that a parser imports, from export/operators/NAME.txt."""
    lines = resource("export", "operators", name + ".txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def our_plugins() -> Iterable[str]:
    """Names of the folders in plugins/ that hold an operator."""
    folder = resource("plugins")
    return [path.parent.name for path in sorted(folder.glob("*/kernel.cuh"))]


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
