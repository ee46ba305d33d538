"""The condition a machine is in: power mode, memory and what takes it, disk.

Unlike what is installed on it (`doctor`), this changes by the hour, and most of it is advice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Iterator, List, Optional

from ..targets import Target
from .line import MISSING, OK, WRONG, Line
from .machine import Machine
from .memory import GIB, available

LEAST_DISK = 10 * GIB  # an FP32 bundle of 1.5B parameters and its engine


def power(machine: Machine) -> Line:
    """The mode of nvpmodel, and how fast the GPU may run in it."""
    mode, name = machine.power_mode()
    if mode is None:
        fix = "sudo nvpmodel -q (from the board itself)"
        if machine.in_container():
            fix = "mount /var/lib/nvpmodel and /etc/nvpmodel.conf into the container to see it"
        return Line("power mode", OK, "unknown", fix)
    clock, held = machine.gpu_clock()
    text = name or "mode %d" % mode
    if clock:
        text += ", GPU up to %d MHz%s" % (clock // 1_000_000, ", held there" if held else "")
    hints = []
    if not name.upper().startswith("MAXN"):
        hints.append("sudo nvpmodel -m 0 for full speed")
    if clock and not held:
        hints.append("sudo jetson_clocks before measuring")
    return Line("power mode", OK, text, ", ".join(hints))


def memory(machine: Machine, target: Optional[Target]) -> Iterator[Line]:
    """What is free, what the machine swaps to, and on a board what else takes its memory."""
    info = machine.meminfo()
    total = info.get("MemTotal", 0)
    try:
        free = available(machine.root)
    except (OSError, ValueError):
        yield Line("memory", MISSING, "unknown", "/proc/meminfo is not readable")
        return
    text = "%.1f of %.1f GiB available" % (free / GIB, total / GIB)
    if free + GIB // 16 < info.get("MemAvailable", 0):
        text += ", the rest is beyond the container's limit"
    if free < total // 4:
        fix = "close other programs"
        if target is not None:
            fix += ", stop the desktop (sudo init 3)"
        if "limit" in text:
            fix += ", raise the container's limit (--memory)"
        yield Line("memory", WRONG, text, fix)
    else:
        yield Line("memory", OK, text)
    swaps = machine.swaps()
    if swaps:
        yield _swap(machine, target, swaps)
    desktop = machine.desktop()
    if desktop and target is not None:
        fix = "sudo init 3 gives its memory to the model, until the next start"
        yield Line("desktop", OK, desktop, fix)
    killed = machine.killed_for_memory()
    if killed:
        fix = "a build that died was one of them: close other programs, or ask for less"
        yield Line("out of memory", OK, killed, fix)


def _swap(machine: Machine, target: Optional[Target], swaps: List[str]) -> Line:
    compressed = all("zram" in x for x in swaps)
    size = machine.meminfo().get("SwapTotal", 0) / GIB
    kind = "compressed memory" if compressed else "swap"
    text = "%.1f GiB of %s (%s)" % (size, kind, _few(swaps))
    hints = ["the GPU cannot use it, and edgepool does not count on it"] if target else []
    held = machine.zram_bytes()
    if held:
        text += ", which holds %.1f GiB of memory" % (held / GIB)
        hints += ["sudo systemctl disable nvzramconfig, and a restart, frees it"] if target else []
    return Line("swap", OK, text, "; ".join(hints))


def _few(names: List[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def disk(root: Path) -> Line:
    """What is free where the machine's root is."""
    free = shutil.disk_usage(str(root)).free
    text = "%.1f GiB free" % (free / GIB)
    if free < LEAST_DISK:
        return Line(
            "disk", WRONG, text, "free some: bundles and engines take 4 bytes per parameter"
        )
    return Line("disk", OK, text)
