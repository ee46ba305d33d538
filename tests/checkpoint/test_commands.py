"""`edgepool import` and `edgepool init` as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgepool.checkpoint import load
from edgepool.cli.main import main
from edgepool.model.presets import PRESETS

from .models import hf_model, write_folder, write_gguf


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_import_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_gguf(hf_model("llama"), tmp_path / "model.gguf")
    capsys.readouterr()
    code, out, err = run(capsys, "import", source, "-o", tmp_path / "model.pt")
    assert code == 0
    assert "writing tensors: 39/39" in err
    for text in ("llama", "4, sparse", "320 tokens", "float32"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100
    assert load(tmp_path / "model.pt").config.index.top_k == 880


def test_import_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(hf_model("qwen2"), tmp_path / "model")
    capsys.readouterr()
    target = tmp_path / "model.pt"
    options = ("--budget", 512, "--window", 64, "--sinks", 32, "--page-size", 32, "--ratio", 8)
    code, out, _ = run(
        capsys, "import", source, "-o", target, *options, "--kv-dtype", "int8", "--json"
    )
    assert code == 0
    summary = json.loads(out)
    assert summary["config"] == load(target).config.to_dict()
    assert summary["config"]["index"]["top_k"] == 416
    assert (summary["family"], summary["bytes"]) == ("qwen2", target.stat().st_size)


def test_import_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(hf_model("qwen3"), tmp_path / "model")
    code, _, _ = run(capsys, "import", source, "--attention", "full", "-o", tmp_path / "m.pt")
    assert code == 0
    assert load(tmp_path / "m.pt").config.layer_types == ("full",) * 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing"], "error: nothing: no such file or folder"),
        (["source", "--budget", "100"], "error: budget: 100 leaves nothing to select"),
        (["source", "--page-size", "18"], "error: page_size: 18 is not a multiple"),
        (["source", "--attention", "dense"], "error: attention: 'dense'"),
        (["source", "--budget", "many"], "error: invalid value for '--budget'"),
        (["source", "-o", "no/model.pt"], "error: no/model.pt: cannot be written"),
        (["source", "-o", "source"], "error: source: is the source"),
    ],
)
def test_import_faults(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    write_folder(hf_model("llama"), tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code, out, err = run(capsys, "import", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(expected)
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "linked", "."],
)
def test_import_never_writes_over_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = write_folder(hf_model("llama"), tmp_path / "model")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "linked").symlink_to(source / "model.safetensors")
    capsys.readouterr()
    target = tmp_path / name if name == "linked" else source / name
    code, out, err = run(capsys, "import", source, "-o", target)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert (tmp_path / "linked").is_symlink()


def test_import_into_the_folder_of_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(hf_model("llama"), tmp_path / "model")
    for _ in range(2):  # it may be written over, too
        assert run(capsys, "import", source, "-o", source / "model.pt")[0] == 0
    assert load(source / "model.pt").config.num_layers == 4


def test_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.pt", "b.pt", "c.pt")]
    for file, seed in zip(files, (7, 7, 8)):
        code, out, err = run(capsys, "init", "edgepool-tiny", "-o", file, "--seed", seed)
        assert (code, out) == (0, "")
        assert f"wrote {file}" in err
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    checkpoint = load(files[0])
    assert checkpoint.config == PRESETS["edgepool-tiny"]
    assert checkpoint.tokenizer is not None


def test_init_json_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m.pt"
    code, out, _ = run(capsys, "init", "edgepool-tiny", "-o", target, "--json")
    expected = {"path": str(target), "preset": "edgepool-tiny", "seed": 0}
    assert json.loads(out) == {**expected, "bytes": target.stat().st_size}
    code, out, err = run(capsys, "init", "edgepool-tinny", "-o", tmp_path / "x.pt")
    assert (code, out) == (2, "")
    assert "did you mean 'edgepool-tiny'?" in err
    assert "edgepool-12l" in err
    assert not (tmp_path / "x.pt").exists()


def test_presets_need_no_torch() -> None:
    """The file itself: its package imports torch for the model."""
    path = Path(__file__).parents[2] / "edgepool" / "model" / "presets.py"
    script = "import sys; sys.modules['torch'] = None; import edgepool.config; exec(sys.argv[1])"
    source = path.read_text().replace("from ..config", "from edgepool.config")
    subprocess.run([sys.executable, "-c", script, source], check=True, cwd=path.parents[2])
