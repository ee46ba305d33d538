"""Preflight: what in an ONNX file a target's TensorRT would refuse, misread or make slow.

    report = check(path, find_target("jetson-agx-xavier"))
    for finding in report.findings: ...

docs/preflight.md lists the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

from ...bundle import GRAPHS, MODEL, Bundle
from ...errors import BadInput
from ...targets import Target
from .graph import Model
from .read import read_model
from .reader import Reader, reader_of
from .rules import ERROR, WARNING, rules

__all__ = ["ERROR", "WARNING", "Finding", "Report", "check", "graphs_of"]

# What `edgepool quantize` and `build-engine` write beside each model.onnx of a bundle.
OTHERS = (GRAPHS["int8"], GRAPHS["fp16"])


@dataclass(frozen=True)
class Finding:
    """One place of a graph, an ONNX file, that breaks one rule."""

    graph: str
    rule: str
    severity: str
    title: str
    where: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """What was found in a file or in a bundle's graphs; findings by rule, errors first."""

    path: Path
    graphs: List[Path]
    target: str
    reader: str
    findings: List[Finding]

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        return {
            "path": str(self.path),
            "graphs": [str(graph) for graph in self.graphs],
            "target": self.target,
            "reader": self.reader,
            "errors": self.count(ERROR),
            "warnings": self.count(WARNING),
            "findings": [dict(vars(finding)) for finding in self.findings],
        }


def check(
    path: Union[str, Path], target: Target, plugins: Iterable[str] = (), calibrator: bool = False
) -> Report:
    """Hold an ONNX file, or the graphs that a bundle has for the target, against every rule.

    plugins: operators that the user's own plugin libraries register; calibrator: the build would
    also be given an INT8 calibrator. Raises BadInput for what cannot be read.
    """
    reader = reader_of(target, plugins, calibrator)
    graphs = graphs_of(Path(path), target)
    findings = [finding for graph in graphs for finding in _findings(read_model(graph), reader)]
    findings.sort(key=lambda finding: (finding.severity != ERROR, finding.rule))
    return Report(Path(path), graphs, target.name, reader.name, findings)


def graphs_of(path: Path, target: Target) -> List[Path]:
    """The ONNX files meant by a path: itself, or a bundle's for the target in each precision.

    Raises BadInput for a bundle that has none for the target.
    """
    if not path.is_dir():
        if not path.is_file():
            raise BadInput("%s: no such file or folder" % path)
        return [path]
    bundle = Bundle.open(path)
    portable = target.functions == bundle.manifest["functions"]
    if portable and target.name not in bundle.manifest["variants"]:
        name = MODEL
    else:
        bundle.variant_path(target.name)
        name = bundle.manifest["variants"][target.name]["model"]
    names = [name, *(name[: name.rfind("/") + 1] + other for other in OTHERS)]
    return [bundle.file(x) for x in names if x in bundle.manifest["files"]]


def _findings(model: Model, reader: Reader) -> List[Finding]:
    """Every place of a model that breaks a rule."""
    graph = str(model.path)
    try:
        return [
            Finding(graph, rule.id, rule.severity, rule.title, where, what, rule.remedy)
            for rule in rules().values()
            for where, what in rule.check(model, reader)
        ]
    except RecursionError as error:
        raise BadInput("%s: one of its functions calls itself" % model.path) from error
