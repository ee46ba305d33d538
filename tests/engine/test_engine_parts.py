"""The parts of build-engine that need no TensorRT."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.engine import memory, tensorrt_api
from edgepool.engine.profiles import Limits, profiles, shape_of
from edgepool.errors import BadInput, MissingRequirement
from edgepool.model.presets import PRESETS

TINY = PRESETS["edgepool-tiny"]


@given(batch=st.integers(1, 8), lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_pages_hold_any_split_of_the_tokens(batch: int, lengths: list[int]) -> None:
    lengths = lengths[:batch]
    pages = Limits(batch, 16, sum(lengths)).pages(TINY)
    assert 1 + sum(-(-n // TINY.page_size) for n in lengths) <= pages


def test_profiles_decode_one_token_and_prefill_many() -> None:
    decode, prefill = profiles(TINY, Limits(2, 64, 512))
    assert decode.axes["seq"] == (1, 1, 1)
    assert prefill.axes["seq"] == (1, 64, 64)
    assert shape_of(["batch", 7, "seq"], prefill, 2) == (2, 7, 64)
    assert decode.axes["pages"][0] == decode.axes["pages"][2]


@pytest.mark.parametrize("limits", [Limits(0, 1, 1), Limits(1, 0, 1), Limits(1, 1, 1 << 40)])
def test_limits_beyond_the_model(limits: Limits) -> None:
    with pytest.raises(BadInput, match="choose 1 to"):
        limits.check(TINY)


def linux(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": "MemAvailable:    4194304 kB\n", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_linux_says(tmp_path: Path) -> None:
    assert memory.available(linux(tmp_path)) == 4 << 30


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_memory_is_within_the_cgroup(tmp_path: Path, version: str) -> None:
    linux(tmp_path)
    folder = tmp_path / "sys/fs/cgroup" / ("memory" if version == "v1" else "")
    names = {
        "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "v2": ("memory.max", "memory.current"),
    }[version]
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(str(3 << 30))
    (folder / names[1]).write_text(str(1 << 30))
    assert memory.available(tmp_path) == 2 << 30
    (folder / names[0]).write_text("max" if version == "v2" else str((1 << 63) - 4096))
    assert memory.available(tmp_path) == 4 << 30


def test_a_board_leaves_room_beside_the_workspace() -> None:
    gib = 1 << 30
    assert memory.workspace_limit(gib, 2 * gib, True, 10 * gib) == 5 * gib + gib // 2
    assert memory.workspace_limit(8 * gib, 2 * gib, True, 10 * gib) == 0
    assert memory.workspace_limit(gib, gib, False, 10 * gib) is None


class Flags:
    """A builder's configuration that keeps what it is told."""

    def __init__(self) -> None:
        self.flags: list[str] = []

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)


def api(version: str, runtime: str = "tensorrt") -> tensorrt_api.Api:
    """TensorRT of a version, as far as `tensorrt_api` looks at it."""
    trt = types.SimpleNamespace(
        __version__=version,
        NetworkDefinitionCreationFlag=types.SimpleNamespace(EXPLICIT_BATCH=0, STRONGLY_TYPED=1),
        BuilderFlag=types.SimpleNamespace(
            FP16="fp16", INT8="int8", OBEY_PRECISION_CONSTRAINTS="obey"
        ),
        TensorFormat=types.SimpleNamespace(LINEAR=0),
        int8="int8",
        float32="float32",
    )
    major, minor = version.split(".")[:2]
    return tensorrt_api.Api(runtime, trt, (int(major), int(minor)))


@pytest.mark.parametrize(
    ("version", "runtime", "network", "flags"),
    [
        ("8.5.2", "tensorrt", 1 << 0, ["fp16", "int8", "obey"]),
        ("10.3.0", "tensorrt", 1 << 1, []),
        ("11.1.0", "tensorrt", 0, []),
        ("1.7.1", "rtx", 0, []),
    ],
)
def test_typing_by_version(version: str, runtime: str, network: int, flags: list[str]) -> None:
    builder = types.SimpleNamespace(create_network=lambda bits: bits)
    assert tensorrt_api.create_network(api(version, runtime), builder) == network
    config = Flags()
    tensorrt_api.set_precision(api(version, runtime), config, "int8")
    assert config.flags == flags


def test_int8_state_of_a_weakly_typed_network_keeps_its_codes() -> None:
    def tensor(name: str, dtype: str) -> Any:
        return types.SimpleNamespace(name=name, dtype=dtype, allowed_formats=3, dynamic_range=None)

    inputs = [tensor("input_ids", "int32"), tensor("k_pool.0", "int8"), tensor("tail.0", "float32")]
    network = types.SimpleNamespace(
        num_inputs=3, num_outputs=0, get_input=inputs.__getitem__, get_output=None
    )
    tensorrt_api.pin_state(api("8.5.2"), network, ("k_pool.0", "tail.0"))
    assert [t.allowed_formats for t in inputs] == [3, 1, 1]
    assert [t.dynamic_range for t in inputs] == [None, (-127.0, 127.0), None]


@pytest.mark.parametrize(
    ("version", "pinned"), [("8.5.2", {"layers.0.attn_norm/Pow"}), ("10.3", set())]
)
def test_norms_of_a_weakly_typed_network_are_fp32(version: str, pinned: set[str]) -> None:
    types_of: dict[tuple[str, int], str] = {}

    def layer(name: str) -> Any:
        return types.SimpleNamespace(
            name=name,
            num_outputs=1,
            precision=None,
            set_output_type=lambda i, dtype: types_of.update({(name, i): dtype}),
        )

    layers = [layer("layers.0.attn_norm/Pow"), layer("layers.0.q_proj/MatMul")]
    network = types.SimpleNamespace(num_layers=2, get_layer=layers.__getitem__)
    tensorrt_api.pin_floats(api(version), network, ("layers.0.attn_norm/Pow", "another"))
    assert {x.name for x in layers if x.precision == "float32"} == pinned
    assert types_of == {(name, 0): "float32" for name in pinned}


def test_a_missing_tensorrt_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tensorrt_api.MODULES, "tensorrt", "no_such_tensorrt")
    with pytest.raises(MissingRequirement, match=r"edgepool\[tensorrt\]"):
        tensorrt_api.find("tensorrt")
