"""The layering of the package: a stage imports only from the stages above it, and from `ops`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "edgepool"
BASE = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
STAGES = (
    "checkpoint model ops exporter quantize engine kvpool runtime board package serve evaluate"
    " train"
).split()


def allowed(stage: str) -> set[str]:
    """Names under `edgepool` that modules of the stage may import."""
    if stage == "cli":
        return BASE | set(STAGES) | {"cli"}
    if stage in STAGES:
        above = [] if stage == "ops" else [*STAGES[: STAGES.index(stage)], "ops"]
        return BASE | {stage, *above}
    return BASE


def imported(path: Path) -> list[tuple[int, str, bool]]:
    """(line, name under `edgepool`, whether at the top level) for every import of the package."""
    tree = ast.parse(path.read_text())
    package = ["edgepool", *path.relative_to(PACKAGE).parts[:-1]]
    top = set(map(id, ast.iter_child_nodes(tree)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module or "").split(".")] if node.module else base
            modules = [".".join([*stem, alias.name]) for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] == "edgepool" and len(parts) > 1 and not parts[1].startswith("__"):
                found.append((node.lineno, parts[1], id(node) in top))
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_upwards(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1 and parts[0] in ("__init__.py", "__main__.py"):
        return  # the public names and the command: they may name any stage
    stage = parts[0] if len(parts) > 1 else ""
    wrong = [
        "%s:%d imports edgepool.%s" % (path.relative_to(PACKAGE), line, name)
        for line, name, top in imported(path)
        if name not in allowed(stage) or (stage == "cli" and top and name in STAGES)
    ]
    assert not wrong, "\n".join(wrong)
