"""The engine of a board: found in the cache, or built into it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from ..bundle import Bundle
from ..engine import build, store, tensorrt_api
from ..engine.footprint import STEP_TOKENS, Memory
from ..engine.graphs import Graph, graph_name, graph_of
from ..engine.memory import GIB
from ..engine.place import Place, place_for
from ..engine.profiles import Limits
from ..errors import BadInput, GateFailed, MissingRequirement
from ..progress import Report
from ..resources import cache_folder
from ..runtime import device_memory, trt_session
from ..runtime.session import Session
from ..targets import Target
from .fit import PRECISIONS, Choice


@dataclass(frozen=True)
class Job:
    """An engine that is wanted, what it is built from, and where it is or will be."""

    bundle: Bundle
    choice: Choice
    options: build.Options
    limits: Limits
    place: Place
    graph: Graph
    root: Path
    name: str
    key: Dict[str, Any]

    @property
    def path(self) -> Path:
        return self.root / self.name / store.ENGINE


@dataclass(frozen=True)
class Found:
    """The engine of a job in the cache, or the reason why there is none to be used."""

    job: Job
    engine: Optional[bytes]
    reason: str = ""


def precisions_of(bundle: Bundle, target: Target) -> List[str]:
    """Precisions of which the bundle has a graph for the target; raises BadInput without any."""
    bundle.variant_path(target.name)
    # A bundle in FP16 has no graph in FP32, its model.onnx is in FP16.
    names = [p for p in PRECISIONS if p != "fp32" or bundle.manifest["dtype"] == "fp32"]
    files = bundle.manifest["files"]
    return [p for p in names if graph_name(bundle, target, p, "tensorrt") in files]


def job_for(bundle: Bundle, target: Target, choice: Choice) -> Job:
    """What it takes to have an engine for a choice. Raises as `build_engine` does."""
    limits = Limits(choice.batch, min(STEP_TOKENS, choice.context), choice.batch * choice.context)
    limits.check(bundle.config)
    options = build.Options(
        precision=choice.precision,
        target=target.name,
        runtime="tensorrt",
        batch=limits.batch,
        input_len=limits.input_len,
        kv_tokens=limits.kv_tokens,
        timing_cache=cache_folder() / "timing" / _file_name(target),
    )
    place = place_for(target.name, "tensorrt", [target.name])
    if place.elsewhere:
        raise MissingRequirement(
            "the GPU here is not that of the %s: is this another board, with its files mounted?"
            % target.title
        )
    graph = graph_of(bundle, target, choice.precision, place.runtime)
    return Job(
        bundle=bundle,
        choice=choice,
        options=options,
        limits=limits,
        place=place,
        graph=graph,
        root=store.cached_root(bundle),
        name="%s-%s" % (place.name, choice.precision),
        key=build.key_of(graph, place, options, limits),
    )


def _file_name(target: Target) -> str:
    """Of measured kernel times, which hold for one TensorRT and one kind of GPU."""
    version = tensorrt_api.find("tensorrt").name
    return "%s-sm_%s" % (re.sub(r"[^\w.]", "-", version), target.sm)


def find(bundle: Bundle, target: Target, choice: Choice) -> Found:
    """Look for the engine of a choice. Raises as `job_for`."""
    job = job_for(bundle, target, choice)
    try:
        record = store.read(job.root, job.name)
        if record is None:
            return Found(job, None, "none in the cache yet")
        reason = store.difference(record, job.key)
        return Found(job, None, reason) if reason else Found(job, load(job))
    except (BadInput, GateFailed) as error:
        return Found(job, None, str(error))


def load(job: Job) -> bytes:
    """The engine. Raises BadInput and GateFailed that say why there is none to be used."""
    return store.load(job.root, job.name, job.key)


def build_into_cache(job: Job, need: Memory, report: Report) -> None:
    """Build the engine, or wait for another build of it; the old one stays until it is there.

    Raises BadInput for a cache that cannot be written or is too small, and what `build.run` raises.
    """
    require_cache(need)
    if job.options.timing_cache is not None:
        job.options.timing_cache.parent.mkdir(exist_ok=True)
    with store.locked(job.root, lambda: report("waiting for another build", 0, 1)):
        if find_again(job):
            return
        with store.staged(job.root, job.name, job.key) as staged:
            staged.facts.update(
                build.describe(job.bundle, job.place, job.choice.precision, job.limits)
            )
            staged.facts.update(
                build.run(
                    job.graph,
                    job.place,
                    job.options,
                    job.limits,
                    job.bundle,
                    staged.engine,
                    report,
                )
            )


def find_again(job: Job) -> bool:
    """Whether another build has made the engine meanwhile."""
    try:
        load(job)
    except (BadInput, GateFailed):
        return False
    return True


def require_cache(need: Memory) -> None:
    """Raise BadInput unless the cache can be written, and has room for an engine."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(str(folder)).free
    except OSError as error:
        raise cannot_write(folder, str(error.strerror)) from error
    if not os.access(str(folder), os.W_OK):
        raise cannot_write(folder, "read-only")
    if free < need.engine:
        raise BadInput(
            "%s: no space left for the engine: it takes %.1f GiB, %.1f GiB are free: free some, or "
            "name another folder in EDGEPOOL_CACHE" % (folder, need.engine / GIB, free / GIB)
        )


def cannot_write(folder: Path, why: str) -> BadInput:
    return BadInput(
        "%s: the cache cannot be written (%s): mount a folder of this user there (-v FOLDER:%s), "
        "or name another in EDGEPOOL_CACHE" % (folder, why.lower(), folder)
    )


def open_session(found: Found) -> Session:
    """A session of the choice over the engine; raises as `trt_session.open_session` does."""
    job = found.job
    assert found.engine is not None
    api = tensorrt_api.find(job.place.runtime)
    if job.place.plugins is not None:
        tensorrt_api.load_plugins(api, job.place.plugins)
    device = device_memory.open_device()
    config = job.bundle.config_of(job.choice.precision)
    return trt_session.open_session(
        found.engine, api.trt, device, config, in_place=True, capacity=job.choice.context
    )
