"""`edgepool run` from the command line, on a small model.pt."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from edgepool.cli.main import main

from .models import write_checkpoint

PROMPT = "Once upon a time, in a land of small models"


@pytest.fixture(scope="module")
def model_pt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("run") / "model.pt"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["run", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, err = run(capsys, "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_text_on_stdout_and_figures_on_stderr(
    capsys: pytest.CaptureFixture[str], model_pt: str
) -> None:
    code, out, err = run(capsys, model_pt, "--prompt", PROMPT, "--max-new-tokens", "8")
    assert code == 0
    record = run_json(capsys, model_pt, "--prompt", PROMPT, "--max-new-tokens", "8")
    assert out == record["text"] + "\n"
    assert err.startswith("model.pt: prompt 43 tokens, ")
    assert "completion 8 tokens, " in err
    assert "% attended" in err


def test_json_record(capsys: pytest.CaptureFixture[str], model_pt: str) -> None:
    record = run_json(capsys, model_pt, "--prompt", PROMPT, "--max-new-tokens", "8")
    assert set(record) == {
        "ran",
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "cache_bytes",
        "attended_fraction",
    }
    assert record["prompt_tokens"] == len(PROMPT)  # a token a byte
    assert record["completion_tokens"] == len(record["token_ids"]) == 8
    assert record["prefill_tokens_per_s"] > 0
    assert record["decode_tokens_per_s"] > 0
    # 51 tokens of capacity: 7 pages and the null page
    assert record["cache_bytes"] == 4 * 2 * (2 * 8 * 2 * 8 * 8 + 8 * 2 * 2 * 8 + 2 * 4 * 2 * 8)
    # queries at 42..49: of context t + 1, sinks 4 + selected 8 + window 8..11
    attended = [12 + (t + 1) - max(0, (t + 1 - 8) // 4 * 4) for t in range(42, 50)]
    assert record["attended_fraction"] == pytest.approx(sum(attended) / sum(range(43, 51)))


def test_sampling_options(capsys: pytest.CaptureFixture[str], model_pt: str) -> None:
    def tokens(*options: str) -> list[int]:
        return run_json(capsys, model_pt, "--prompt", PROMPT, "--max-new-tokens", "12", *options)[
            "token_ids"
        ]

    hot = ("--temperature", "5", "--seed", "1")
    assert tokens(*hot) == tokens(*hot)
    assert tokens(*hot) != tokens("--temperature", "5", "--seed", "2")
    assert tokens(*hot, "--top-k", "1") == tokens(*hot, "--top-p", "1e-9") == tokens()
    assert tokens("--repetition-penalty", "100") != tokens()


def test_stop_and_end(capsys: pytest.CaptureFixture[str], model_pt: str) -> None:
    options = (model_pt, "--prompt", PROMPT, "--max-new-tokens", "12")
    text = run_json(capsys, *options)["text"]
    stopped = run_json(capsys, *options, "--stop", text[3:5], "--stop", "never")
    assert stopped["text"] == text[: text.index(text[3:5])]
    assert stopped["finish_reason"] == "stop"


def test_prompt_from_stdin(
    capsys: pytest.CaptureFixture[str], model_pt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (model_pt, "--max-new-tokens", "4", "--prompt")
    stdin = io.TextIOWrapper(io.BytesIO((PROMPT + "\n").encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert run_json(capsys, *options, "-")["text"] == run_json(capsys, *options, PROMPT)["text"]


def test_chat(capsys: pytest.CaptureFixture[str], model_pt: str) -> None:
    options = (model_pt, "--max-new-tokens", "4", "--prompt")
    plain = run_json(capsys, *options, "[system]Be brief\n[user]Hello\n[assistant]")
    chatted = run_json(capsys, *options, "Hello", "--chat", "--system", "Be brief")
    assert chatted["token_ids"] == plain["token_ids"]
    assert chatted["prompt_tokens"] == plain["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 129], "has 129 tokens, but the context has room for 128"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--prompt", "x", "--system", "y"], "--system needs --chat"),
        (["--prompt", "x", "--backend", "tensorflow"], "'tensorflow' is not one of ort, torch"),
        (["--prompt", "x", "--backend", "ort"], "ONNX Runtime runs a bundle"),
        (["--prompt", "x", "--device", "tpu"], "--device: 'tpu' is not one of cpu, cuda"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--prompt", "x", "--top-p", "0"], "top_p: 0.0 is not above 0"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "x", "--stop", ""], "empty stop string"),
        (["--prompt", "x", "--int8"], "--int8: ONNX Runtime runs a bundle's model.int8.onnx"),
        ([], "--prompt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], model_pt: str, options: list[str], message: str
) -> None:
    code, out, err = run(capsys, model_pt, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_nothing_to_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "--prompt", "x")[::2] == (
        2,
        "error: edgepool-bundle: no such bundle: `edgepool export model.pt` makes one\n",
    )
    assert "model.pt: no such file" in run(capsys, "model.pt", "--prompt", "x")[2]


def test_a_model_without_tokenizer_or_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from edgepool.checkpoint import load, random_weights, save

    from .fakes import config

    bare = config()
    save(tmp_path / "bare.pt", bare, random_weights(bare, 0), None)
    assert load(tmp_path / "bare.pt").tokenizer is None
    code, _, err = run(capsys, str(tmp_path / "bare.pt"), "--prompt", "x")
    assert (code, err.count("\n")) == (2, 1)
    assert "no tokenizer" in err
    plain = write_checkpoint(tmp_path / "plain.pt", bare)
    code, _, err = run(capsys, str(plain), "--prompt", "x", "--chat")
    assert (code, err.count("\n")) == (2, 1)
    assert "no chat template" in err
