"""Preflight: what in an ONNX file a target's TensorRT would refuse, misread or make slow.

    report = check(path, find_target("jetson-agx-xavier"))
    for finding in report.findings: ...

docs/preflight.md lists the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

from ...bundle import Bundle
from ...errors import BadInput
from ...targets import Target
from .graph import Model
from .read import read_model
from .reader import Reader, reader_of
from .rules import ERROR, WARNING, rules

__all__ = ["ERROR", "WARNING", "Finding", "Report", "check", "check_model", "graph_of"]


@dataclass(frozen=True)
class Finding:
    """One place of a model that breaks one rule."""

    rule: str
    severity: str
    title: str
    where: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """What was found in a file; findings of a rule stand together, errors first."""

    path: Path
    target: str
    reader: str
    findings: List[Finding]

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        return {
            "path": str(self.path),
            "target": self.target,
            "reader": self.reader,
            "errors": self.count(ERROR),
            "warnings": self.count(WARNING),
            "findings": [dict(vars(finding)) for finding in self.findings],
        }


def check(
    path: Union[str, Path], target: Target, plugins: Iterable[str] = (), calibrator: bool = False
) -> Report:
    """Hold an ONNX file, or the graph that a bundle has for the target, against every rule.

    plugins: operators that the user's own plugin libraries register; calibrator: the build would
    also be given an INT8 calibrator. Raises BadInput for what cannot be read.
    """
    file = graph_of(Path(path), target)
    return check_model(read_model(file), reader_of(target, plugins, calibrator))


def graph_of(path: Path, target: Target) -> Path:
    """The ONNX file meant by a path; raises BadInput for a bundle that has none for the target."""
    if path.is_dir():
        bundle = Bundle.open(path)
        portable = target.functions == bundle.manifest["functions"]
        if portable and target.name not in bundle.manifest["variants"]:
            return bundle.model_path
        return bundle.variant_path(target.name)
    if not path.is_file():
        raise BadInput("%s: no such file or folder" % path)
    return path


def check_model(model: Model, reader: Reader) -> Report:
    """Hold a model that was read against every rule."""
    findings = []
    try:
        for rule in rules().values():
            for where, what in rule.check(model, reader):
                findings.append(
                    Finding(rule.id, rule.severity, rule.title, where, what, rule.remedy)
                )
    except RecursionError as error:
        raise BadInput("%s: one of its functions calls itself" % model.path) from error
    findings.sort(key=lambda finding: (finding.severity != ERROR, finding.rule))
    return Report(model.path, reader.target.name, reader.name, findings)
