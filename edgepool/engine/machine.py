"""What the files of a machine say about it: of this one, or of one that is mounted in a folder.

Nothing of the other machine is executed or loaded, and links in it are followed inside it.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

LARGEST_FILE = 64 << 20
MOST_LINKS = 40
MACHINES = ("aarch64", "x86_64")
CLOCKS = "/sys/class/devfreq"
# Name of the GPU's clock: the chip. The last is Orin's from L4T r36 on.
CHIPS = {
    "17000000.gv11b": "tegra194",
    "17000000.ga10b": "tegra234",
    "17000000.gpu": "tegra234",
}
# The second is where containers get it by convention (NVIDIA's jetson-containers).
BOARD_NAMES = ("/proc/device-tree/model", "/tmp/nv_jetson_model")
DESKTOPS = ("gnome-shell", "plasmashell", "xfce4-session", "lxsession", "Xorg", "Xwayland")
LOGS = ("/var/log/kern.log", "/var/log/syslog")
LONGEST_LOG = 100_000  # messages of the kernel, more than it keeps


@dataclass(frozen=True)
class Found:
    """A piece of software: version as text, path on its machine."""

    version: str
    path: str


class Machine:
    """The files below `root`; `/` is the machine we run on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def is_this(self) -> bool:
        return os.path.realpath(str(self.root)) == "/"

    # ------------------------------------------------------------------------------- files

    def path(self, name: str) -> Optional[Path]:
        """Where the machine's own path `name` is, its links followed below root; None without."""
        pending, links = [p for p in name.split("/") if p], 0
        done: List[str] = []
        while pending:
            part = pending.pop(0)
            if part in (".", ".."):
                done = done[:-1] if part == ".." else done
                continue
            here = self.root.joinpath(*done, part)
            if not os.path.islink(str(here)):
                done.append(part)
                continue
            links += 1
            if links > MOST_LINKS:
                return None
            to = os.readlink(str(here))
            done = [] if to.startswith("/") else done
            pending = [p for p in to.split("/") if p] + pending
        found = self.root.joinpath(*done)
        return found if found.exists() else None

    def read(self, name: str) -> str:
        """A file's text; empty if it is not there, not readable or no plain file."""
        path = self.path(name)
        if path is None or not path.is_file():
            return ""
        try:
            with path.open("rb") as stream:
                return stream.read(LARGEST_FILE).decode("utf-8", "replace").replace("\0", " ")
        except OSError:
            return ""  # some files of /proc and /sys refuse at times; the line says `unknown`

    def names(self, folder: str, pattern: str) -> List[str]:
        """Paths of a folder's entries that match, sorted."""
        path = self.path(folder)
        if path is None or not path.is_dir():
            return []
        try:
            entries = sorted(os.listdir(str(path)))
        except PermissionError:
            return []
        return ["%s/%s" % (folder, x) for x in entries if fnmatch.fnmatch(x, pattern)]

    # ------------------------------------------------------------------------------ system

    def system(self) -> str:
        """Name of the distribution, and the CPU."""
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)', self.read("/etc/os-release"), re.M)
        name = match.group(1) if match else "unknown system"
        return "%s, %s" % (name, self.cpu() or "unknown CPU")

    def cpu(self) -> str:
        """aarch64 or x86_64; empty if nothing tells."""
        if self.is_this:
            return platform.machine()
        return next((x for x in MACHINES if self.path("/usr/lib/%s-linux-gnu" % x)), "")

    def board(self) -> str:
        """What a Jetson calls itself; empty for another machine."""
        if not self.chip():
            return ""
        names = (self.read(path).split() for path in BOARD_NAMES)
        return " ".join(next(filter(None, names), [self.chip()]))

    def chip(self) -> str:
        """tegra194 (Xavier), tegra234 (Orin) or another Tegra; empty for another machine.

        In a container the device tree is hidden: there the GPU's clock says it, by its name.
        """
        match = re.search(r"nvidia,(tegra\d+)", self.read("/proc/device-tree/compatible"))
        if match:
            return match.group(1)
        clocks = [path.split("/")[-1] for path in self.names(CLOCKS, "*")]
        return next((CHIPS[name] for name in clocks if name in CHIPS), "")

    def l4t(self) -> Tuple[int, str]:
        """(35, "35.4.1") of `# R35 (release), REVISION: 4.1, ...`; (0, "") without."""
        pattern = r"R(\d+) \(release\), REVISION: ([\d.]+)"
        match = re.search(pattern, self.read("/etc/nv_tegra_release"))
        return (int(match.group(1)), "%s.%s" % match.groups()) if match else (0, "")

    def in_container(self) -> bool:
        return self.path("/.dockerenv") is not None or self.path("/run/.containerenv") is not None

    def gpus(self) -> List[str]:
        """GPUs that the driver lists; a Jetson's is part of its chip."""
        found = []
        for folder in self.names("/proc/driver/nvidia/gpus", "*"):
            match = re.search(r"Model:\s*(.+)", self.read(folder + "/information"))
            found.append(match.group(1).strip() if match else "unknown")
        if (
            not found
            and self.chip()
            and self.names("/dev", "nvhost-gpu") + self.names("/dev", "nvgpu")
        ):
            found = [self.chip()]
        return found

    def driver(self) -> Optional[Found]:
        """libcuda, which only the driver brings, with the version of the driver if it says it."""
        match = re.search(
            r"NVRM version:.*?(\d+\.\d+[\d.]*)", self.read("/proc/driver/nvidia/version")
        )
        found = self.find_library("libcuda.so")
        return found and Found(match.group(1) if match else found.version, found.path)

    # ---------------------------------------------------------------------------- software

    def packages(self) -> Dict[str, str]:
        """Version of every Debian package that is installed."""
        found = {}
        for paragraph in self.read("/var/lib/dpkg/status").split("\n\n"):
            fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", paragraph, re.M))
            if fields.get("Status", "").endswith(" installed"):
                found[fields.get("Package", "")] = fields.get("Version", "")
        return found

    def python(self) -> str:
        """Version of the Python that runs edgepool, of another machine that of its python3."""
        if self.is_this:
            return platform.python_version()
        path = self.path("/usr/bin/python3")
        match = re.search(r"python(\d+\.\d+)$", path.name if path is not None else "")
        return match.group(1) if match else ""

    def site_folders(self) -> List[str]:
        """Where Python packages are."""
        if self.is_this:
            return [x for x in sys.path if x.startswith("/")]
        folders = ["/usr/lib/python3/dist-packages"]
        for base in ("/usr/lib", "/usr/local/lib", *self.names("/home", "*"), "/root", "/opt/venv"):
            inner = {"/usr/lib": "", "/usr/local/lib": "", "/opt/venv": "/lib"}.get(
                base, "/.local/lib"
            )
            for python in self.names(base + inner, "python3.*"):
                folders += [python + "/dist-packages", python + "/site-packages"]
        return folders

    def python_packages(self) -> Dict[str, Found]:
        """Python packages by normalised name; the first on the path counts."""
        found: Dict[str, Found] = {}
        for folder in self.site_folders():
            for path in self.names(folder, "*-info"):
                match = re.match(
                    r"(.+?)-(\d[^-]*)(-py[\d.]+)?\.(dist|egg)-info$", path.split("/")[-1]
                )
                if match:
                    name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
                    found.setdefault(name, Found(match.group(2), folder))
        return found

    def find_library(self, stem: str) -> Optional[Found]:
        """The newest library `stem` or `stem.N...` in the places where NVIDIA's software goes."""
        found = [
            Found(name[len(stem) + 1 :], path)
            for folder in self.folders_of_libraries()
            for path in self.names(folder, stem + "*")
            for name in [path.split("/")[-1]]
            if re.fullmatch(r"(\.\d+)*", name[len(stem) :]) and self.path(path) is not None
        ]
        return max(found, key=lambda x: (numbers(x.version), len(x.version)), default=None)

    def folders_of_libraries(self) -> List[str]:
        folders = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64"]
        for cpu in MACHINES:
            base = "/usr/lib/%s-linux-gnu" % cpu
            folders += [base, base + "/tegra", base + "/nvidia"]
        folders += [x + "/lib64" for x in self.names("/usr/local", "cuda-*")]
        for base in ("/usr/local/tensorrt", "/opt/tensorrt", *self.names("/opt", "TensorRT-*")):
            folders += [base + "/lib"]
        for site in self.site_folders():
            folders += [site + "/tensorrt_libs", site + "/nvidia/cuda_runtime/lib"]
        return folders

    def cuda(self) -> Optional[Found]:
        """The CUDA toolkit or runtime: version.json of the toolkit, else libcudart."""
        for folder in ("/usr/local/cuda", *reversed(self.names("/usr/local", "cuda-*"))):
            match = re.search(
                r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"',
                self.read(folder + "/version.json"),
            )
            if match:
                return Found(match.group(1), folder)
        return self.find_library("libcudart.so")

    # ------------------------------------------------------------------------------- power

    def power_mode(self) -> Tuple[Optional[int], str]:
        """Id of the mode of nvpmodel and its name in nvpmodel.conf."""
        match = re.search(r"pmode:0*(\d+)", self.read("/var/lib/nvpmodel/status"))
        if match is None:
            return None, ""
        pattern = r"POWER_MODEL\s+ID=%s\s+NAME=(\S+)" % match.group(1)
        name = re.search(pattern, self.read("/etc/nvpmodel.conf"))
        return int(match.group(1)), name.group(1) if name else ""

    def gpu_clock(self) -> Tuple[int, bool]:
        """(highest Hz that the GPU may run at, whether it is held there); 0 if not known."""
        for folder in self.names(CLOCKS, "*"):
            if re.search(r"\.(gv11b|ga10b|gpu)$", folder):
                least, most = (
                    self.read("%s/%s_freq" % (folder, x)).strip() for x in ("min", "max")
                )
                if most.isdigit():
                    return int(most), least == most
        return 0, False

    def meminfo(self) -> Dict[str, int]:
        """/proc/meminfo in bytes."""
        lines = re.findall(r"^(\w+):\s+(\d+) kB", self.read("/proc/meminfo"), re.M)
        return {name: int(count) * 1024 for name, count in lines}

    def swaps(self) -> List[str]:
        """Devices and files that the machine swaps to."""
        return [
            line.split()[0] for line in self.read("/proc/swaps").splitlines()[1:] if line.split()
        ]

    def zram_bytes(self) -> int:
        """Memory that compressed swap takes: the third figure of mm_stat (zram.rst of Linux)."""
        stats = (self.read(path + "/mm_stat").split() for path in self.names("/sys/block", "zram*"))
        return sum(int(stat[2]) for stat in stats if len(stat) > 2 and stat[2].isdigit())

    # ------------------------------------------------------------------- what else runs

    def desktop(self) -> str:
        """The desktop that runs, or will after a start; empty without one."""
        running = {
            self.read(path + "/comm").strip() for path in self.names("/proc", "[0-9]*")
        }.intersection(DESKTOPS)
        if running:
            return "running (%s)" % ", ".join(sorted(running))
        if self.in_container():
            return ""  # it would show the container's own
        default = self.path("/etc/systemd/system/default.target")
        default = default or self.path("/lib/systemd/system/default.target")
        graphical = default is not None and default.name == "graphical.target"
        return "starts with the board" if graphical and not self.is_this else ""

    def killed_for_memory(self) -> str:
        """What Linux killed because memory ran out, since it started; empty for nothing."""
        names = re.findall(r"ut of memory: Killed process \d+ \(([^)\n]*)\)", self.kernel_log())
        if names:
            return "Linux killed %d, the last was %s" % (len(names), names[-1])
        count = re.search(r"^oom_kill ([1-9]\d*)$", self.read("/proc/vmstat"), re.M)
        return "Linux killed %s since it started" % count.group(1) if count else ""

    def kernel_log(self) -> str:
        """What the kernel said, as far as this user may read it."""
        files = "".join(self.read(name) for name in LOGS)
        return files or (_kernel_messages() if self.is_this else "")


def numbers(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version: (8, 5, 2) of `8.5.2-1+cuda11.4`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(x) for x in match.group().split(".")) if match else ()


def _kernel_messages() -> str:
    """The messages that the kernel keeps; empty for a user who may not read them."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    messages = []
    try:
        for _ in range(LONGEST_LOG):
            try:
                messages.append(os.read(descriptor, 1 << 13))  # one message at a time
            except BrokenPipeError:
                continue  # it was overwritten while we read
            except OSError:
                break  # no more, or not allowed
    finally:
        os.close(descriptor)
    return b"".join(messages).decode("utf-8", "replace")
