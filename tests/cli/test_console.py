"""What is printed, to a terminal and to a pipe."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from edgepool.cli import console

PROGRESS = """
from edgepool.cli import console
with console.progress() as report:
    for i in range(4):
        report("writing tensors", i, 3)
console.error("broken")
"""


def on_a_terminal(script: str, **environment: str) -> str:
    """What the script writes to a terminal on its stderr."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(follower)
    written = b""
    while True:
        try:
            written += os.read(leader, 65536)
        except OSError:  # Linux reports EIO when the last writer has left
            break
    os.close(leader)
    assert process.wait(timeout=20) == 0
    return written.decode()


def test_progress_in_a_pipe_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0, 9.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress() as report:
        for done in range(5):
            report("writing", done, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "writing: 2/4, 6.0 s, 6 s left",
        "writing: 4/4, 9.0 s",
    ]


def test_progress_on_a_terminal_is_a_bar_and_obeys_no_color() -> None:
    coloured = on_a_terminal(PROGRESS, NO_COLOR="")
    assert "writing tensors" in coloured
    assert "3/3" in coloured
    assert "\033[31merror:\033[0m broken" in coloured
    plain = on_a_terminal(PROGRESS, NO_COLOR="1")
    assert "3/3" in plain
    assert "error: broken" in plain
    assert "\033[31m" not in plain


def test_table_fits_and_aligns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["attn.q_proj", 12, "a " * 200], ["mlp", 1234, "[bold]not markup[/bold]"]]
    console.print_table(["layer", "bytes", "note"], rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= console.WIDTH
    assert lines[0].split() == ["layer", "bytes", "note"]
    assert lines[1].index("12") == lines[-1].index("34")  # numbers end in one column
    assert "[bold]not markup[/bold]" in lines[-1]


def test_json_is_one_readable_object(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": "naïve", "ids": [1, 2]})
    printed = capsys.readouterr().out
    assert "naïve" in printed
    assert json.loads(printed) == {"text": "naïve", "ids": [1, 2]}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_bytes_text(count: int, text: str) -> None:
    assert console.bytes_text(count) == text
