"""The command line as a person meets it: start-up, help, mistakes, and how it leaves."""

from __future__ import annotations

import errno
import os
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from edgepool import __version__
from edgepool.cli import main as cli
from edgepool.errors import BadInput, GateFailed, MissingRequirement

EDGEPOOL = [sys.executable, "-m", "edgepool"]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EDGEPOOL, *arguments], capture_output=True, text=True, **options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], int]:
    """Run a function as if it were the sub-command `probe`; returns the exit code."""

    def invoke(body: Callable[[], None]) -> int:
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.callback()(lambda: None)
        app.command("probe")(body)
        monkeypatch.setattr(cli, "app", app)
        return cli.main(["probe"])

    return invoke


def test_help_names_every_command_in_pipeline_order() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert result.stderr == ""
    listed = result.stdout.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "]
    assert [name for name in names if name in cli.COMMANDS] == list(cli.COMMANDS)
    assert 'edgepool run --prompt "The capital of France is"' in result.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command_has_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.returncode == 0
    assert "\n    edgepool %s" % name in result.stdout


def test_no_arguments_is_help() -> None:
    assert run().stdout == run("--help").stdout


def test_version() -> None:
    assert run("--version").stdout == "edgepool %s\n" % __version__


def test_help_takes_under_400_ms() -> None:
    """In processor time, which is the wall time on an idle machine and the same on a busy one."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert statistics.median(seconds() for _ in range(5)) < 0.4


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from edgepool.cli.main import main; main(['--help']); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "onnx", "onnxruntime", "tokenizers", "jinja2", "rich"}


def test_unknown_command_names_the_nearest() -> None:
    result = run("exprot")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: no such command 'exprot'. Did you mean 'export'? (see 'edgepool --help')\n"
    )


def test_unknown_option_is_one_line() -> None:
    result = run("run", "--promt", "x")
    assert result.returncode == 2
    assert "--prompt" in result.stderr
    assert "(see 'edgepool run --help')" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "code"), [(BadInput, 2), (GateFailed, 1), (MissingRequirement, 3)]
)
def test_errors_become_one_line_and_an_exit_code(
    kind: type, code: int, command: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise kind("model.pt: truncated\n  at byte 7")

    assert command(body) == code
    assert capsys.readouterr() == ("", "error: model.pt: truncated at byte 7\n")


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "b/model.onnx"),
            2,
            "b/model.onnx: no space",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "/x: permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2, "/x: permission denied"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "m.pt"),
            2,
            "m.pt: no such file",
        ),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "d"), 2, "d: is a directory"),
        (MemoryError(), 3, "out of memory"),
        (RuntimeError("std::bad_alloc"), 3, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 3, "out of memory"),
        (Exception("Failed to allocate memory for requested buffer"), 3, "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 3, "out of memory"),
        (ModuleNotFoundError("", name="torch.onnx"), 3, "pip install 'edgepool[export]'"),
        (ModuleNotFoundError("", name="tensorrt_rtx_bindings"), 3, "edgepool[rtx]"),
    ],
    ids=str,
)
def test_what_the_machine_refuses_is_one_line(
    failure: Exception,
    code: int,
    message: str,
    command: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> None:
        raise failure

    assert command(body) == code
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_stdout_cannot_hold(encoding: str) -> None:
    script = (
        "import sys\n"
        "from edgepool.cli import console, main as cli\n"
        "@cli.app.command()\n"
        "def probe() -> None:\n"
        "    print('caf\\u00e9 \\u4f60 \\ud800')\n"
        "    console.print_table(['name'], [['\\u4f60']])\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    expected = "café 你 ?\nname\n你\n".encode(encoding, "replace")
    assert result.stdout == expected


@pytest.mark.parametrize(
    "failure",
    [ValueError("x"), RuntimeError("x"), OSError(errno.EIO, "I/O"), ImportError("x")],
)
def test_our_own_faults_are_not_hidden(failure: Exception, command: Callable) -> None:
    def body() -> None:
        raise failure

    with pytest.raises(type(failure)):
        command(body)


def test_ctrl_c_leaves_with_130() -> None:
    script = (
        "import signal, sys, time, typer\n"
        "from edgepool.cli import main as cli\n"
        "@cli.app.command()\n"
        "def probe() -> None:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        # a shell starts what runs behind it with Ctrl-C ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*EDGEPOOL, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert process.returncode == 1
    assert process.stderr == ""


def test_completion_offers_commands_and_options() -> None:
    def complete(words: str) -> list[str]:
        environment = {
            **os.environ,
            "_EDGEPOOL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return run(env=environment).stdout.split()

    assert complete("edgepool exp") == ["export"]
    assert "--prompt" in complete("edgepool run --p")


def test_main_module_and_function_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == run("--version").stdout
