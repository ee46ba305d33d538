"""edgepool doctor on imitated machines: what is right passes, each fault is named with its fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from edgepool.cli.main import main
from edgepool.engine import condition
from edgepool.engine.doctor import examine
from edgepool.engine.line import MISSING, OK, WRONG, Line
from edgepool.engine.machine import Machine
from edgepool.errors import BadInput
from edgepool.plugin_library import NAME

from .sysroots import (
    ORIN,
    ORIN5,
    ORIN7,
    PC,
    PC_WITH_GPU,
    XAVIER,
    Files,
    dpkg,
    make,
    meminfo,
    packages,
    plugin_library,
)

GIB = 1 << 30


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB free, whatever this machine has."""
    monkeypatch.setattr(condition.shutil, "disk_usage", lambda path: Usage(100 * GIB))


def lines(folder: Path, files: Files) -> dict[str, Line]:
    return {line.name: line for line in examine(make(folder, files))}


def faults(found: dict[str, Line]) -> dict[str, str]:
    return {name: line.state for name, line in found.items() if line.state != OK}


def without(files: Files, *parts: str) -> Files:
    return {name: x for name, x in files.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            XAVIER,
            {
                "system": "Ubuntu 20.04.6 LTS, aarch64",
                "board": "Jetson-AGX",
                "JetPack": "JetPack 5.1.2, L4T 35.4.1",
                "GPU": "tegra194",
                "CUDA": "11.4.315",
                "cuDNN": "8.6.0",
                "TensorRT": "8.5.2",
                "TensorRT for Python": "8.5.2",
                "Python": "3.8",
                "onnxruntime": "1.19.2",
                "power mode": "MAXN, GPU up to 1377 MHz, held there",
                "memory": "26.0 of 30.4 GiB available",
                "swap": "15.2 GiB of compressed memory (/dev/zram0)",
            },
        ),
        (
            ORIN,
            {"JetPack": "JetPack 6.1+b123, L4T 36.4.0", "CUDA": "12.6.68", "TensorRT": "10.3.0"},
        ),
        (ORIN5, {"JetPack": "JetPack 5.1.2, L4T 35.4.1", "TensorRT": "8.5.2", "Python": "3.8"}),
        (ORIN7, {"JetPack": "JetPack 7.2, L4T 39.2.0", "CUDA": "13.2.1", "TensorRT": "10.16.2"}),
        (
            PC_WITH_GPU,
            {
                "driver": "570.86.15",
                "GPU": "NVIDIA GeForce RTX 4090",
                "CUDA": "12.8.0",
                "TensorRT": "10.8.0",
                "memory": "50.0 of 62.7 GiB available",
            },
        ),
    ],
    ids=["xavier", "orin", "orin-jp5", "orin-jp7", "pc-with-gpu"],
)
def test_a_machine_that_has_everything(
    files: Files, expected: dict[str, str], tmp_path: Path
) -> None:
    found = lines(tmp_path, files)
    assert faults(found) == {}
    assert {name: found[name].found for name in expected} == expected


def test_places_are_those_of_the_machine(tmp_path: Path) -> None:
    """Its absolute links lead into the folder, never out of it."""
    found = lines(tmp_path, XAVIER)
    assert found["CUDA"].path == "/usr/local/cuda"
    assert found["TensorRT"].path == "/usr/lib/aarch64-linux-gnu/libnvinfer.so.8.5.2"
    machine = Machine(tmp_path)
    assert machine.path("/usr/local/cuda") == tmp_path / "usr/local/cuda-11.4"
    assert machine.path("/../../etc/os-release") == tmp_path / "etc/os-release"


def test_links_that_lead_out_or_in_circles(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("PRETTY_NAME=secret")
    root = make(
        tmp_path / "root",
        {
            "/etc/os-release": "->../../../../../../secret",
            "/proc/meminfo": "->/proc/swaps",
            "/proc/swaps": "->/proc/meminfo",
        },
    )
    machine = Machine(root)
    assert machine.read("/etc/os-release") == ""
    assert machine.path("/proc/meminfo") is None
    assert {line.name: line for line in examine(root)}["memory"].state == MISSING


def test_a_pc_without_a_gpu(tmp_path: Path) -> None:
    found = lines(tmp_path, PC)
    assert faults(found) == {"GPU": MISSING}
    assert "CPU" in found["GPU"].fix
    assert found["TensorRT-RTX"].found == "1.7.1.116"
    assert not {"CUDA", "TensorRT", "plugin library", "board", "power mode"} & set(found)
    other = lines(tmp_path / "other", without(PC, "tensorrt_rtx"))
    assert faults(other) == {"GPU": MISSING, "TensorRT-RTX": MISSING}
    assert other["TensorRT-RTX"].fix == "pip install 'edgepool[rtx]'"


LIB = "/usr/lib/aarch64-linux-gnu"
XAVIER_PLUGINS = f"/home/jetson/.cache/edgepool/plugins/sm_72/{NAME}"


@pytest.mark.parametrize(
    ("files", "line", "state", "fix"),
    [
        (
            {**without(XAVIER, "libnvinfer.so", "tensorrt-8"), f"{LIB}/libnvinfer.so.8.6.1": None},
            "TensorRT",
            WRONG,
            "JetPack 5.1 has 8.5.2.2: sudo apt install --reinstall nvidia-jetpack",
        ),
        (without(XAVIER, "libnvinfer"), "TensorRT", MISSING, "nvidia-jetpack"),
        (without(ORIN, "libnvonnxparser"), "TensorRT's ONNX parser", MISSING, "nvidia-jetpack"),
        (without(ORIN, "tensorrt-10"), "TensorRT for Python", MISSING, "python3-libnvinfer"),
        (
            {
                **without(ORIN, "tensorrt-10"),
                "/usr/local/lib/python3.10/dist-packages/tensorrt-10.9.0.dist-info/METADATA": None,
            },
            "TensorRT for Python",
            WRONG,
            "TensorRT is 10.3.0",
        ),
        (without(ORIN, "cuda"), "CUDA", MISSING, "nvidia-jetpack"),
        (without(XAVIER, "libcudnn"), "cuDNN", MISSING, "nvidia-jetpack"),
        (without(XAVIER, ".cache"), "plugin library", MISSING, "edgepool build-plugins"),
        (
            {**XAVIER, XAVIER_PLUGINS: plugin_library("10.3.0", 72)},
            "plugin library",
            WRONG,
            "TensorRT is 8.5.2",
        ),
        (
            {**XAVIER, XAVIER_PLUGINS: plugin_library("8.5.2", 87)},
            "plugin library",
            WRONG,
            "the GPU is sm_72",
        ),
        (
            {**XAVIER, XAVIER_PLUGINS: plugin_library("8.5.2", 72, machine=62)},
            "plugin library",
            WRONG,
            "it is for x86_64",
        ),
        (
            {**XAVIER, XAVIER_PLUGINS: plugin_library("8.5.2", 72, version="0.0.1")},
            "plugin library",
            WRONG,
            "this is edgepool",
        ),
        ({**XAVIER, XAVIER_PLUGINS: b"\x7fELF"}, "plugin library", WRONG, "build-plugins"),
        (
            {**XAVIER, "/etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, GCID: 1\n"},
            "JetPack",
            WRONG,
            "flash JetPack 5.1",
        ),
        (
            {**ORIN, "/etc/nv_tegra_release": "# R41 (release), REVISION: 1.0, GCID: 1\n"},
            "JetPack",
            WRONG,
            "or a newer edgepool",
        ),
        (without(ORIN, "nv_tegra_release"), "JetPack", MISSING, "reinstall JetPack"),
        (
            {**without(ORIN, "libcuda.so"), "/.dockerenv": None},
            "driver",
            MISSING,
            "start it with --runtime nvidia",
        ),
        (without(ORIN, "/dev/"), "GPU", WRONG, "reboot"),
        ({**XAVIER, "/proc/meminfo": meminfo(30.4, 4.0)}, "memory", WRONG, "sudo init 3"),
        (
            {
                **ORIN,
                "/sys/fs/cgroup/memory.max": str(6 * GIB),
                "/sys/fs/cgroup/memory.current": str(GIB),
            },
            "memory",
            WRONG,
            "raise the container's limit",
        ),
        (without(XAVIER, "onnxruntime"), "onnxruntime", MISSING, "pip install edgepool"),
        (
            {
                **ORIN,
                **packages("/usr/local/lib/python3.10/dist-packages", {"onnxruntime_gpu": "1.23"}),
            },
            "onnxruntime",
            WRONG,
            "overwrite each other",
        ),
        (
            {**PC, "/usr/bin/python3": "->python3.6", "/usr/bin/python3.6": None},
            "Python",
            WRONG,
            "3.8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_one_fault(files: Files, line: str, state: str, fix: str, tmp_path: Path) -> None:
    found = lines(tmp_path, files)
    assert found[line].state == state, found[line]
    assert fix in found[line].fix


def test_a_tensorrt_that_is_too_old_for_a_pc(tmp_path: Path) -> None:
    lib = "/usr/lib/x86_64-linux-gnu"
    old = without(PC_WITH_GPU, "libnvinfer", "libnvonnxparser", "tensorrt-10")
    old = {**old, f"{lib}/libnvinfer.so.8.6.1": None, f"{lib}/libnvonnxparser.so.8.6.1": None}
    found = lines(tmp_path, old)
    assert found["TensorRT"].state == WRONG
    assert "10.3 or later" in found["TensorRT"].fix


def test_hints_beside_what_is_right(tmp_path: Path) -> None:
    slow = {
        **XAVIER,
        "/var/lib/nvpmodel/status": "pmode:0001 fmode:quiet\n",
        "/sys/class/devfreq/17000000.gv11b/min_freq": "114750000\n",
    }
    line = lines(tmp_path, slow)["power mode"]
    assert (line.state, line.found) == (OK, "MODE_15W, GPU up to 1377 MHz")
    assert line.fix == "sudo nvpmodel -m 0 for full speed, sudo jetson_clocks before measuring"
    assert "does not count on it" in lines(tmp_path / "o", ORIN)["swap"].fix


def test_what_takes_memory_is_told(tmp_path: Path) -> None:
    busy = {
        **ORIN,
        "/sys/block/zram0/mm_stat": "2147483648 536870912 1073741824 0 0 0 0 0\n",
        "/sys/block/zram1/mm_stat": "0 0 1073741824 0 0 0 0 0\n",
        "/proc/1/comm": "systemd\n",
        "/proc/912/comm": "gnome-shell\n",
        "/proc/915/comm": "Xorg\n",
        "/var/log/kern.log": "Out of memory: Killed process 71 (chrome) total-vm:1kB\n"
        "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:9kB\n",
    }
    found = lines(tmp_path, busy)
    assert faults(found) == {}
    assert "which holds 2.0 GiB of memory" in found["swap"].found
    assert "nvzramconfig" in found["swap"].fix
    assert found["desktop"].found == "running (Xorg, gnome-shell)"
    assert "sudo init 3" in found["desktop"].fix
    assert found["out of memory"].found == "Linux killed 2, the last was python3"
    counted = lines(tmp_path / "o", {**ORIN, "/proc/vmstat": "oom_kill 3\n"})
    assert counted["out of memory"].found == "Linux killed 3 since it started"
    assert not {"desktop", "out of memory"} & set(lines(tmp_path / "p", ORIN))


def test_what_the_kernel_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine, where no log has it: /dev/kmsg, if this user may read it."""
    ends = os.pipe()
    os.write(ends[1], b"3,812,4711,-;Out of memory: Killed process 5 (trtexec) total-vm:9kB\n")
    os.set_blocking(ends[0], False)  # no more is to come, as with O_NONBLOCK
    monkeypatch.setattr(Machine, "read", lambda self, name: "")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags: ends[0])
        found = Machine().killed_for_memory()
    assert found == "Linux killed 1, the last was trtexec"
    os.close(ends[1])

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert Machine().killed_for_memory() == ""


def test_a_desktop_that_will_start(tmp_path: Path) -> None:
    target = "/lib/systemd/system/graphical.target"
    files = {**ORIN, target: None, "/etc/systemd/system/default.target": "->" + target}
    assert lines(tmp_path, files)["desktop"].found == "starts with the board"
    inside = lines(tmp_path / "c", {**files, "/.dockerenv": None})
    assert "desktop" not in inside


@pytest.mark.parametrize(
    ("files", "clock", "target"),
    [(XAVIER, "gv11b", "8.5.2"), (ORIN, "ga10b", "10.3.0"), (ORIN7, "gpu", "10.16.2")],
    ids=["xavier", "orin", "orin-jp7"],
)
def test_a_board_seen_from_a_container(
    files: Files, clock: str, target: str, tmp_path: Path
) -> None:
    """Docker hides the device tree; the GPU's clock and nv_tegra_release are left."""
    inside = {name: x for name, x in files.items() if "device-tree" not in name}
    inside = without(inside, "devfreq", "nvpmodel")
    inside[f"/sys/class/devfreq/17000000.{clock}/max_freq"] = "1300500000\n"
    inside.update({"/.dockerenv": None, "/tmp/nv_jetson_model": "NVIDIA Jetson AGX\0"})
    found = lines(tmp_path, inside)
    assert found["TensorRT"].found == target
    assert found["board"].found == "NVIDIA Jetson AGX"
    assert faults(found) == {}
    assert "into the container" in found["power mode"].fix
    hidden = lines(tmp_path / "hidden", without(inside, "nv_tegra_release"))
    assert faults(hidden) == {}
    assert "mount /etc/nv_tegra_release" in hidden["JetPack"].fix


def test_removed_packages_do_not_count(tmp_path: Path) -> None:
    status = dpkg({"nvidia-jetpack": "5.1.2"}).replace(
        "install ok installed", "deinstall ok config-files"
    )
    found = lines(tmp_path, {**XAVIER, "/var/lib/dpkg/status": status})
    assert found["JetPack"].found == "JetPack 5, L4T 35.4.1"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condition.shutil, "disk_usage", lambda path: Usage(GIB))
    assert lines(tmp_path, XAVIER)["disk"].state == WRONG


def test_files_of_any_content_are_survived(tmp_path: Path) -> None:
    """Every file in turn as garbage, and every file as a folder."""
    for number, name in enumerate(XAVIER):
        for kind, content in (("g", b"\xff\x00:\x80" * 99), ("d", None)):
            files = {**XAVIER, name: content}
            if kind == "d":
                files = {**without(XAVIER, name), name + "/x": None}
            examine(make(tmp_path / f"{number}{kind}", files))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make(tmp_path / "good", XAVIER)
    assert main(["doctor", "--sysroot", str(good)]) == 0
    printed = capsys.readouterr()
    assert max(map(len, printed.out.splitlines())) <= 100
    assert "8.5.2" in printed.out
    assert printed.err == "this machine has what engines need\n"

    bad = make(tmp_path / "bad", without(ORIN, "libnvinfer.so"))
    assert main(["doctor", "--sysroot", str(bad)]) == 3
    assert "error: not as engines need it: TensorRT" in capsys.readouterr().err
    assert main(["doctor", "--sysroot", str(bad), "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    states = {line["name"]: line["state"] for line in record["lines"]}
    assert states["TensorRT"] == MISSING
    assert states["CUDA"] == OK


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 3)
    record = json.loads(capsys.readouterr().out)
    found = {line["name"]: line for line in record["lines"]}
    assert found["numpy"]["state"] == OK
    assert found["memory"]["found"].endswith("available")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        examine(tmp_path / "nothing")
