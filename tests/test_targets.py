"""Target profiles and `edgepool targets`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgepool import targets
from edgepool.cli.main import main
from edgepool.errors import BadInput
from edgepool.resources import resource

NAMES = (
    "jetson-agx-xavier jetson-agx-orin-jp5 jetson-agx-orin jetson-agx-orin-jp7 a100 l4 h100 b200 "
    "rtx-4090 rtx-5090 cpu"
).split()


def test_every_target_has_a_profile() -> None:
    assert set(targets.load_targets()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_whole(name: str) -> None:
    target = targets.find_target(name)
    assert target.recommended_precision in target.precisions
    assert (target.opset, target.ir_version) in ((17, 8), (20, 9))
    if target.kind != "cpu":
        assert target.sm
        assert target.memory_gib
        assert target.bandwidth_gb_s
        assert target.top_k == 3840
        assert {"tensorrt", "tensorrt_rtx"} & set(target.software)
    if target.operators:
        assert resource("export", "operators", target.operators + ".txt").is_file()
    if target.kind == "jetson":
        assert not {"fp8", "fp4"} & set(target.precisions)
        assert target.shared_memory
        assert target.runs_plugins
    # Every target has a container but those whose engines another machine builds.
    assert (target.image is None) == ("tensorrt_rtx" in target.software)
    assert json.loads(json.dumps(target.to_dict()))["name"] == name


def test_xavier_is_what_it_is() -> None:
    """Figures of the board that other stages decide by."""
    xavier = targets.find_target("jetson-agx-xavier")
    assert (xavier.sm, xavier.opset, xavier.operators) == (72, 17, "tensorrt-8.5")
    assert not {"bf16", "tf32"} & set(xavier.precisions)
    assert xavier.software["tensorrt"] == "8.5.2.2"
    assert [mode.name for mode in xavier.power_modes[:3]] == ["MAXN", "10 W", "15 W"]


def test_one_image_serves_both_boards_of_jetpack_5() -> None:
    xavier, orin = map(targets.find_target, ("jetson-agx-xavier", "jetson-agx-orin-jp5"))
    assert xavier.image == orin.image
    assert xavier.image and {xavier.sm, orin.sm} == set(xavier.image.sm)
    assert xavier.software == orin.software
    assert (xavier.opset, xavier.operators) == (orin.opset, orin.operators)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("sm = [87]", "sm = [72]"), "lacks the GPU's own 87"),
        (("sm = [87]", ""), "has TensorRT and `sm`, or neither"),
        (("r36.4.0", "latest"), "does not name a registry and a version"),
        (("l4t-jetpack:r36.4.0", "l4t-jetpack"), "does not name a registry and a version"),
        (("sm = [87]", 'sm = [87]\ntensorrt = "10.7.0"'), "has tensorrt 10.7.0, the board 10.3"),
        (("sm = [87]", 'sm = [87]\npython = "3.12"'), "has python 3.12, the board 3.10"),
        (("sm = [87]", "sm = [87]\ntag = 1"), "unknown key 'tag' in \\[image\\]"),
    ],
    ids=lambda value: str(value[1] or "none") if isinstance(value, tuple) else "",
)
def test_an_image_that_does_not_fit(
    change: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = resource("export", "targets", "jetson-agx-orin.toml").read_text()
    before, after = text.split("[image]")
    assert change[0] in after
    (tmp_path / "x.toml").write_text(before + "[image]" + after.replace(*change, 1))
    monkeypatch.setattr(targets, "resource", lambda *_: tmp_path)
    with pytest.raises(BadInput, match=message):
        targets.load_targets()


def test_unknown_names() -> None:
    with pytest.raises(BadInput, match="did you mean 'rtx-4090'"):
        targets.find_target("rtx-4009")
    assert [t.name for t in targets.find_targets(["l4", "a100", "l4"])] == ["l4", "a100"]


def test_a_profile_with_an_unknown_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "resource", lambda *_: tmp_path)
    (tmp_path / "x.toml").write_text('title = "x"\nspeed = 3\n')
    with pytest.raises(BadInput, match="unknown key 'speed'"):
        targets.load_targets()
    (tmp_path / "x.toml").write_text("title = \n")
    with pytest.raises(BadInput, match="cannot be read"):
        targets.load_targets()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for name in NAMES:
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    assert main(["targets", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(NAMES)
    assert main(["targets", "jetson-agx-orin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sm"] == 87
    assert main(["targets", "jetson-orin"]) == 2
    assert "did you mean" in capsys.readouterr().err
