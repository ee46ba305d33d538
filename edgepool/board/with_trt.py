"""A session of TensorRT on this machine's engine, which is built where the cache has none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Dict, Optional

from ..bundle import Bundle
from ..engine import gpu, tensorrt_api
from ..engine.build import Killed
from ..engine.doctor import profile_of
from ..engine.footprint import Memory
from ..engine.line import MISSING, OK, WRONG, Line
from ..engine.machine import Machine
from ..engine.memory import RESERVE, available
from ..engine.place import target_here
from ..engine.plan import GPU_RESERVE
from ..errors import MissingRequirement
from ..progress import Report
from . import engine
from .fit import Choice, Model, Room, fitting, nothing_fits
from .power import faster_mode
from .wish import Opened, Tell, Wish, first_choice, tell_of_less, tell_of_room


def open_session(bundle: Bundle, wish: Wish, report: Report, tell: Tell, root: Path) -> Opened:
    """Raises MissingRequirement for what does not fit, BadInput for what the bundle has not, and
    what a build raises."""
    here, machine = gpu.find(), Machine(root)
    if here is None:
        raise MissingRequirement(
            "the driver finds no GPU: in a container, start it with --runtime nvidia and in the "
            "groups that own the GPU (--group-add video --group-add render)"
        )
    api = tensorrt_api.find("tensorrt")
    target = profile_of(machine) or target_here(here, api, None, list(bundle.manifest["variants"]))
    precisions = engine.precisions_of(bundle, target)
    model = Model(bundle.config_of, precisions, bundle.manifest["dtype"], target)
    first = first_choice(bundle, precisions, wish)
    free = available(root) - RESERVE
    running = free if target.shared_memory else here.memory - GPU_RESERVE
    looked: Dict[Choice, engine.Found] = {}

    def find(choice: Choice) -> engine.Found:
        if choice not in looked:
            looked[choice] = engine.find(bundle, target, choice)
        return looked[choice]

    def room_for(choice: Choice) -> Room:
        builds = find(choice).engine is None and target.shared_memory
        return Room(running, free if builds else None)

    ended: Optional[Choice] = None
    for choice in fitting(model, first, room_for, wish.adapt, tell_of_less(tell)):
        tell_of_room(model, choice, room_for(choice), tell)
        faster = faster_mode(
            bundle.config_of(choice.precision), target, choice, machine.power_mode()[0]
        )
        if faster is not None:
            tell(Line("speed", OK, faster))
        try:
            found = _built(find(choice), model.needs(choice), report, tell)
        except Killed:
            ended = choice
            tell(Line("engine", WRONG, "memory ran out while %s was built" % choice))
            continue
        return Opened(choice, found.job.name, engine.open_session(found), exact=False)
    raise nothing_fits(model, first, room_for, wish.adapt, ended)


def _built(found: engine.Found, need: Memory, report: Report, tell: Tell) -> engine.Found:
    """The engine that was found, or a new one."""
    job = found.job
    if found.engine is not None:
        tell(Line("engine", OK, "%s, from the cache" % job.path))
        return found
    tell(Line("engine", MISSING, found.reason, "it is built now, which takes minutes"))
    started = time.monotonic()
    engine.build_into_cache(job, need, report)
    tell(Line("engine", OK, "%s, built in %.0f s" % (job.path, time.monotonic() - started)))
    return engine.Found(job, engine.load(job))
