"""From a bundle to a session that gives what PyTorch gave, or the reason why not.

The machine, the bundle and the cache are looked at; what is asked for has to fit; the engine is
built where the cache has none for this machine; the gate runs. Nothing is written but the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..bundle import MANIFEST, Bundle
from ..engine.line import OK, WRONG, Line
from ..engine.memory import GIB, RESERVE, available
from ..engine.plan import MOST_BATCH
from ..errors import BadInput, EdgepoolError, GateFailed
from ..progress import Report
from ..runtime import ort_session
from ..runtime.session import Session
from ..targets import find_target
from . import gate
from .fit import Choice, Model, Room, settle
from .machine import machine_lines, require

STEPS = ("bundle", "room", "engine", "parity")  # names of the lines of the steps

Tell = Callable[[Line], None]


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None: what the bundle has.

    backend  `trt` or `ort`; adapt: take less where it does not fit
    """

    bundle: Path
    backend: str = "trt"
    precision: Optional[str] = None
    context: Optional[int] = None
    batch: int = 1
    adapt: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Ready:
    """A session that passed the gate."""

    bundle: Bundle
    choice: Choice
    session: Session
    outcome: gate.Outcome

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON types."""
        return {
            "bundle": str(self.bundle.path),
            **vars(self.choice),
            "cache_bytes": self.session.cache_bytes,
            "parity": self.outcome.to_dict(),
        }


def make_ready(wish: Wish, report: Report, tell: Tell, root: Path = Path("/")) -> Ready:
    """Take every step; `tell` gets a line about each as soon as it is known.

    root: the machine's files. Raises what the first step that failed raised; steps that do not
    depend on it are taken all the same, so that all that is wrong is told at once.
    """
    faults: List[EdgepoolError] = []

    def attempt(name: str, step: Callable[[], str]) -> None:
        try:
            tell(Line(name, OK, step()))
        except EdgepoolError as error:
            faults.append(error)
            tell(Line(name, WRONG, str(error)))

    lines = machine_lines(wish.backend, root)
    for line in lines:
        tell(line)
    try:
        require(lines)
    except EdgepoolError as error:
        faults.append(error)
    bundle: List[Bundle] = []
    attempt("bundle", lambda: _verified(wish.bundle, bundle, report))
    if faults:
        raise faults[0]
    ready = _with_onnx_runtime(bundle[0], wish, report, tell, root)
    fault = ready.outcome.fault()
    text = "%.1f %% of best tokens are PyTorch's, logits within %.2g" % (
        100 * ready.outcome.agreement,
        ready.outcome.largest,
    )
    if fault is not None:
        ready.session.close()
        tell(Line("parity", WRONG, text))
        raise GateFailed(
            "%s in %s does not give what PyTorch gave: %s: nothing it would say can be trusted"
            % (bundle[0].path, ready.choice, fault)
        )
    tell(Line("parity", OK, text))
    return ready


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


def _verified(path: Path, opened: List[Bundle], report: Report) -> str:
    bundle = Bundle.open(find_bundle(path))
    report("verifying the bundle", 0, 1)
    bundle.verify()
    report("verifying the bundle", 1, 1)
    gate.prompts_of(bundle)
    opened.append(bundle)
    return "%s: %d files as they were written" % (bundle.path, len(bundle.manifest["files"]))


def _with_onnx_runtime(bundle: Bundle, wish: Wish, report: Report, tell: Tell, root: Path) -> Ready:
    """A session of ONNX Runtime on the CPU, which runs the portable graphs as they are."""
    graphs = {"int8": "model.int8.onnx", bundle.manifest["dtype"]: "model.onnx"}
    precisions = [p for p, name in graphs.items() if name in bundle.manifest["files"]]
    model = Model(bundle.config_of, precisions, bundle.manifest["dtype"], find_target("cpu"))
    room = Room(available(root) - RESERVE, None)
    choice = _settled(model, first_choice(bundle, precisions, wish), lambda _: room, wish, tell)
    session = ort_session.open_session(
        bundle.file(graphs[choice.precision]),
        bundle.config_of(choice.precision),
        batch=choice.batch,
        capacity=choice.context,
        threads=wish.threads,
    )
    limits = gate.limits_of(bundle, choice.precision, exact=True)
    return Ready(
        bundle, choice, session, gate.compare(session, gate.prompts_of(bundle), limits, report)
    )


def first_choice(bundle: Bundle, precisions: Sequence[str], wish: Wish) -> Choice:
    """What was asked for, and for the rest the bundle's own float type and whole context.

    Raises BadInput for what the bundle does not have.
    """
    precision = wish.precision
    if precision is None:
        precision = next(p for p in ("fp16", "fp32", "int8") if p in precisions)
    if precision not in precisions:
        raise BadInput(
            "%s: no graph in %s for this machine: choose %s"
            % (bundle.path, precision.upper(), " or ".join(precisions))
        )
    context = bundle.config.max_context if wish.context is None else wish.context
    if not 1 <= context <= bundle.config.max_context:
        raise BadInput(
            "--context %d: choose 1 to %d for this model" % (context, bundle.config.max_context)
        )
    if not 1 <= wish.batch <= MOST_BATCH:
        raise BadInput("--batch %d: choose 1 to %d" % (wish.batch, MOST_BATCH))
    return Choice(precision, context, wish.batch)


def _settled(
    model: Model, first: Choice, room_for: Callable[[Choice], Room], wish: Wish, tell: Tell
) -> Choice:
    def say(text: str) -> None:
        tell(Line("room", WRONG, text))

    choice = settle(model, first, room_for, wish.adapt, say)
    need, room = model.needs(choice), room_for(choice)
    text = "%s takes %.1f GiB, %.1f GiB can be used" % (
        choice,
        need.total / GIB,
        room.running / GIB,
    )
    tell(Line("room", OK, text))
    return choice
