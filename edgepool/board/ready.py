"""From a bundle to a session that gives what PyTorch gave, or the reason why not.

The machine, the bundle and the cache are looked at; what is asked for has to fit; the engine is
built where the cache has none for this machine; the gate runs. Nothing is written but the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict

from ..bundle import MANIFEST, Bundle
from ..engine.line import OK, WRONG, Line
from ..errors import BadInput, EdgepoolError, GateFailed
from ..progress import Report
from ..runtime.session import Session
from . import gate, with_ort, with_trt
from .fit import Choice
from .machine import machine_lines, require
from .wish import Opened, Tell, Wish

# Names of the lines that a log shows in any case: what the machine is, and the steps.
MACHINE = ("board", "JetPack", "GPU", "TensorRT", "plugin library", "power mode", "memory")
STEPS = ("bundle", "room", "speed", "engine", "parity")


@dataclass(frozen=True)
class Ready:
    """A session that passed the gate. file: the graph or engine that it runs."""

    bundle: Bundle
    choice: Choice
    file: str
    session: Session
    outcome: gate.Outcome

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        return {
            "bundle": str(self.bundle.path),
            "ran": self.file,
            **vars(self.choice),
            "cache_bytes": self.session.cache_bytes,
            "parity": self.outcome.to_dict(),
        }


def make_ready(wish: Wish, report: Report, tell: Tell, root: Path = Path("/")) -> Ready:
    """Take every step; `tell` gets a line about each as soon as it is known.

    root: the machine's files. Raises MissingRequirement, BadInput or GateFailed of the first step
    that fails; the bundle is looked at where the machine lacks something, too, so that both are
    told at once.
    """
    lines = machine_lines(wish.backend, root)
    for line in lines:
        tell(line)
    try:
        bundle = verified(wish.bundle, report)
    except EdgepoolError as error:
        tell(Line("bundle", WRONG, str(error)))
        require(lines)
        raise
    files = len(bundle.manifest["files"])
    tell(Line("bundle", OK, "%s: %d files as they were written" % (bundle.path, files)))
    require(lines)
    if wish.backend == "ort":
        opened = with_ort.open_session(bundle, wish, tell, root)
    else:
        opened = with_trt.open_session(bundle, wish, report, tell, root)
    try:
        outcome = held_to_pytorch(bundle, opened, report, tell)
    except BaseException:
        opened.session.close()
        raise
    return Ready(bundle, opened.choice, opened.file, opened.session, outcome)


def verified(path: Path, report: Report) -> Bundle:
    """The bundle, every file of which is as it was written; raises BadInput."""
    bundle = Bundle.open(find_bundle(path))
    bundle.verify(report)
    gate.prompts_of(bundle)
    return bundle


def find_bundle(folder: Path) -> Path:
    """The folder if it is a bundle, else the one bundle in it; raises BadInput for several."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return folder
    found = sorted(path.parent for path in folder.glob("*/" + MANIFEST))
    if len(found) > 1:
        raise BadInput(
            "%s: it holds %d bundles: name one of %s"
            % (folder, len(found), ", ".join(path.name for path in found[:5]))
        )
    return found[0] if found else folder


def held_to_pytorch(bundle: Bundle, opened: Opened, report: Report, tell: Tell) -> gate.Outcome:
    """The gate; raises GateFailed for a session that gives something else than PyTorch."""
    prompts = gate.prompts_of(bundle)
    limits = gate.limits_of(bundle, prompts, opened.choice.precision, opened.exact)
    outcome = gate.compare(opened.session, prompts, limits, report)
    text = "%.1f %% of best tokens are PyTorch's, logits within %.2g" % (
        100 * outcome.agreement,
        outcome.largest,
    )
    fault = outcome.fault()
    tell(Line("parity", OK if fault is None else WRONG, text))
    if fault is not None:
        raise GateFailed(
            "%s in %s does not give what PyTorch gave: %s: nothing it would say can be trusted"
            % (bundle.path, opened.choice, fault)
        )
    return outcome
