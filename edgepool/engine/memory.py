"""Memory that a build may take: what Linux says is available, within the limits of a container."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

GIB = 1 << 30
RESERVE = 3 * GIB // 2  # left to the desktop, the driver and the process itself on a board
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 where there is none


def available(root: Path = Path("/")) -> int:
    """Bytes that a process can still get: MemAvailable, and what is left of its cgroup's limit.

    Page cache counts as available, unlike in cudaMemGetInfo on a Jetson; swap does not count, a
    GPU cannot use it. Raises OSError or ValueError where /proc/meminfo is not as Linux writes it.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    lines = [line for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    if not lines:
        raise ValueError("/proc/meminfo has no MemAvailable")
    free = int(lines[0].split()[1]) * 1024
    left = _left_of_cgroup(root)
    return free if left is None else max(0, min(free, left))


def _left_of_cgroup(root: Path) -> Optional[int]:
    for folder, limit, used in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most, current = _number(root / folder / limit), _number(root / folder / used)
        if most is not None and current is not None and most < NO_LIMIT:
            return most - current
    return None


def _number(path: Path) -> Optional[int]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def workspace_limit(weights: int, pools: int, shared: bool, free: int) -> Optional[int]:
    """Bytes of workspace that TensorRT may take, or None for its own default.

    On a board the GPU's memory is the machine's: what is free, less the weights, the pools and
    RESERVE.
    """
    return max(0, free - weights - pools - RESERVE) if shared else None
