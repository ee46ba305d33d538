"""Machines imitated by their files: what a board or a PC has in the places that doctor reads.

Contents are those of real systems (file formats of L4T, dpkg, the NVIDIA driver), cut to what
matters. `make` writes a machine into a folder.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from edgepool import __version__
from edgepool.plugin_library import FORMAT, NAME, VERSION

Files = dict[str, "str | bytes | None"]  # None: an empty file; a str that begins with `->`: a link

DEPENDENCIES = {
    "jinja2": "3.1.6",
    "numpy": "1.24.4",
    "onnxruntime": "1.19.2",
    "rich": "13.9.4",
    "tokenizers": "0.20.3",
    "typer": "0.20.0",
}


def make(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str) and content.startswith("->"):
            path.symlink_to(content[2:])
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content or b"")
    return folder


def dpkg(packages: dict[str, str]) -> str:
    paragraph = "Package: {}\nStatus: install ok installed\nArchitecture: arm64\nVersion: {}\n"
    return "\n".join(paragraph.format(*item) for item in packages.items())


def meminfo(total_gib: float, available_gib: float, swap_gib: float = 0) -> str:
    rows = {"MemTotal": total_gib, "MemAvailable": available_gib, "SwapTotal": swap_gib}
    return "".join(f"{name}:  {int(gib * (1 << 20))} kB\n" for name, gib in rows.items())


def cuda_json(version: str) -> str:
    return json.dumps({"cuda": {"name": "CUDA SDK", "version": version}})


def packages(folder: str, extra: dict[str, str] | None = None) -> Files:
    found = {**DEPENDENCIES, **(extra or {})}
    return {f"{folder}/{name}-{v}.dist-info/METADATA": None for name, v in found.items()}


def plugin_library(
    tensorrt: str,
    sm: int,
    machine: int = 183,
    version: str = __version__,
    emulated: bool = False,
) -> bytes:
    """An ELF64 file with nothing but the record of an edgepool plugin library."""
    record = {
        "format": FORMAT,
        "record": VERSION,
        "version": version,
        "commit": "",
        "cuda": "12.6",
        "tensorrt": tensorrt,
        "interface": "IPluginV3",
        "sm": [sm],
        "ptx": [],
        "emulated": emulated,
        "operators": [],
    }
    text, names = json.dumps(record).encode(), b"\0.edgepool_record\0.shstrtab\0"
    at = 64 + len(text) + len(names)
    section = struct.Struct("<2I4Q2I2Q").pack
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<2HI3QI6H", 3, machine, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 2)
    table = section(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    table += section(1, 1, 0, 0, 64, len(text), 0, 0, 1, 0)
    table += section(18, 3, 0, 0, 64 + len(text), len(names), 0, 0, 1, 0)
    return header + text + names + table


def jetson(
    chip: str,
    model: str,
    l4t: str,
    os: str,
    python: str,
    jetpack: str,
    cuda: str,
    tensorrt: str,
    cudnn: str,
    gpu: str,
    sm: int,
) -> Files:
    lib, site = "/usr/lib/aarch64-linux-gnu", f"/usr/local/lib/python{python}/dist-packages"
    release, revision = l4t.split(".", 1)
    return {
        "/etc/os-release": f'PRETTY_NAME="{os}"\nID=ubuntu\n',
        "/etc/nv_tegra_release": f"# R{release} (release), REVISION: {revision}, GCID: 33958178, "
        "BOARD: generic, EABI: aarch64, DATE: Tue Aug  1 19:57:35 UTC 2023\n",
        "/proc/device-tree/model": model + "\0",
        "/proc/device-tree/compatible": f"nvidia,p3701-0000\0nvidia,{chip}\0",
        "/dev/nvhost-gpu": None,
        "/usr/bin/python3": f"->python{python}",
        f"/usr/bin/python{python}": None,
        "/var/lib/dpkg/status": dpkg({"nvidia-jetpack": jetpack, "libnvinfer-dev": tensorrt}),
        "/usr/local/cuda": "->/etc/alternatives/cuda",
        "/etc/alternatives/cuda": f"->/usr/local/cuda-{'.'.join(cuda.split('.')[:2])}",
        f"/usr/local/cuda-{'.'.join(cuda.split('.')[:2])}/version.json": cuda_json(cuda),
        f"{lib}/tegra/libcuda.so.1.1": None,
        f"{lib}/tegra/libcuda.so": "->libcuda.so.1.1",
        f"{lib}/libnvinfer.so.{tensorrt}": None,
        f"{lib}/libnvinfer.so": f"->libnvinfer.so.{tensorrt}",
        f"{lib}/libnvonnxparser.so.{tensorrt}": None,
        f"{lib}/libcudnn.so.{cudnn}": None,
        f"/usr/lib/python{python}/dist-packages/tensorrt-{tensorrt}.dist-info/METADATA": None,
        **packages(site),
        f"/home/jetson/.cache/edgepool/plugins/sm_{sm}/{NAME}": plugin_library(tensorrt, sm),
        "/var/lib/nvpmodel/status": "pmode:0000 fmode:quiet\n",
        "/etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n"
        "< POWER_MODEL ID=1 NAME=MODE_15W >\n",
        f"/sys/class/devfreq/17000000.{gpu}/max_freq": "1377000000\n",
        f"/sys/class/devfreq/17000000.{gpu}/min_freq": "1377000000\n",
        "/proc/meminfo": meminfo(30.4, 26.0, 15.2),
        "/proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 5\n",
    }


XAVIER = jetson(
    "tegra194", "Jetson-AGX", "35.4.1", "Ubuntu 20.04.6 LTS", "3.8", "5.1.2-b104", "11.4.315",
    "8.5.2", "8.6.0", "gv11b", 72,
)  # fmt: skip
ORIN = jetson(
    "tegra234", "NVIDIA Jetson AGX Orin Developer Kit", "36.4.0", "Ubuntu 22.04.5 LTS", "3.10",
    "6.1+b123", "12.6.68", "10.3.0", "9.3.0", "ga10b", 87,
)  # fmt: skip
ORIN5 = jetson(
    "tegra234", "NVIDIA Jetson AGX Orin Developer Kit", "35.4.1", "Ubuntu 20.04.6 LTS", "3.8",
    "5.1.2-b104", "11.4.315", "8.5.2", "8.6.0", "ga10b", 87,
)  # fmt: skip
ORIN7 = jetson(
    "tegra234", "NVIDIA Jetson AGX Orin Developer Kit", "39.2.0", "Ubuntu 24.04.3 LTS", "3.12",
    "7.2-b50", "13.2.1", "10.16.2", "9.20.0", "ga10b", 87,
)  # fmt: skip

PC = {
    "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    "/usr/lib/x86_64-linux-gnu/libc.so.6": None,
    "/usr/bin/python3": "->python3.12",
    "/usr/bin/python3.12": None,
    "/proc/meminfo": meminfo(62.7, 50.0),
    **packages("/usr/local/lib/python3.12/dist-packages", {"tensorrt_rtx_cu12_libs": "1.7.1.116"}),
}
PC_WITH_GPU = {
    **PC,
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  "
    "Thu Jan 23 05:23:39 UTC 2025\n",
    "/proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 4090\n"
    "IRQ:   \t\t 180\n",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15": None,
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1": "->libcuda.so.570.86.15",
    "/usr/local/cuda-12.8/version.json": cuda_json("12.8.0"),
    "/usr/lib/x86_64-linux-gnu/libnvinfer.so.10.8.0": None,
    "/usr/lib/x86_64-linux-gnu/libnvonnxparser.so.10.8.0": None,
    "/usr/lib/python3.12/dist-packages/tensorrt-10.8.0.43.dist-info/METADATA": None,
    f"/home/me/.cache/edgepool/plugins/sm_89/{NAME}": plugin_library("10.8.0", 89, machine=62),
}
