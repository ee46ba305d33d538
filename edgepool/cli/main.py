"""The `edgepool` command: registers the sub-commands and turns every failure into one line.

To add a command `NAME`: write `edgepool/cli/NAME_command.py` with one function named `command`, and
put NAME and a line about it in COMMANDS. Every start imports all command modules, `--help` too, so:

* at the top of the module import only the standard library, `typer`, `edgepool.cli.console`,
  `edgepool.config` and `edgepool.errors`; import the stage that does the work inside the function
  (a test forbids torch, numpy, onnx and rich in `edgepool --help`);
* declare options by default value, `budget: int = typer.Option(1024, help="...")`: typer evaluates
  annotations, and Python 3.8 has no `typing.Annotated`, `list[str]` or `str | None` (write
  `Optional[Path]`, `List[str]`);
* the docstring is the help text: what it does, then `Examples:` under a line holding only `\\b`,
  which makes typer keep the line breaks (as below);
* print results on stdout, everything else (progress, notes) on stderr, with `edgepool.cli.console`;
* raise `edgepool.errors.BadInput`, `GateFailed` or `MissingRequirement`; never exit by hand.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any, Optional, Sequence, Type

import typer
import typer.core

from .. import __version__
from ..errors import BadInput, EdgepoolError, MissingRequirement, out_of_memory
from . import console

# In the order of the pipeline, which is the order of `edgepool --help`.
COMMANDS = {
    "import": "Turn a GGUF file or a Hugging Face folder into a model.pt.",
    "init": "Write a model.pt with random weights.",
    "export": "Turn a model.pt into a bundle: ONNX, proved equal to PyTorch.",
    "calibrate": "Measure the ranges of activations, for INT8.",
    "quantize": "Write a bundle's graphs in INT8.",
    "verify": "Compare a bundle with the model.pt it came from.",
    "inspect": "Show what a bundle, model.pt, ONNX file or plugin library holds.",
    "targets": "List the devices that can be exported to.",
    "check": "Check that a target's TensorRT reads a graph as it is meant.",
    "plan": "Show what a model takes and gives on a target, before building.",
    "build-plugins": "Compile the TensorRT plugins of edgepool's operators.",
    "build-engine": "Build a TensorRT engine from a bundle.",
    "package": "Write all that a board needs into one file; check or unpack it.",
    "docker-args": "Print what docker build has to be told for a target.",
    "run": "Generate text.",
    "doctor": "Show whether this machine has what engines need.",
}

# What `pip install` must be told when one of these modules is missing.
EXTRA_OF_MODULE = {
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "gguf": "export",
    "polygraphy": "export",
    "tensorrt": "tensorrt",
    "tensorrt_rtx_bindings": "rtx",
}

# Newer releases of typer carry a copy of click, so that its base class has no one name to import.
ClickException: Type[Exception] = typer.BadParameter.__mro__[2]

# Plain help reads as well, and rich costs 0.2 s at every start. typer 0.20, the last one for Python
# 3.8, escapes brackets for rich as long as it sees rich installed.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="edgepool",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": console.WIDTH},
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 3 this machine lacks something.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo("edgepool %s" % __version__)
        raise typer.Exit()


@app.callback()
def edgepool(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Take a long-context language model from PyTorch to ONNX Runtime and TensorRT.

    \b
    Examples:
      edgepool import SmolLM2-135M-Instruct.gguf -o model.pt
      edgepool export model.pt
      edgepool run --prompt "The capital of France is"
    """


for _name, _summary in COMMANDS.items():
    _module = importlib.import_module("edgepool.cli.%s_command" % _name.replace("-", "_"))
    app.command(_name, short_help=_summary)(_module.command)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line `argv` (the process's own by default) and return its exit code."""
    return run(app, "edgepool", argv)


def run(application: typer.Typer, name: str, argv: Optional[Sequence[str]]) -> int:
    """Run an application of this house; every failure becomes one line and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    _print_whatever_comes()
    try:
        code = application(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except EdgepoolError as failure:
        return _fail(failure)
    except ClickException as failure:
        return _fail(BadInput(_usage_message(failure)))
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT  # what a shell reports for Ctrl-C
    except ModuleNotFoundError as failure:
        return _fail(_missing_module(failure))
    except BrokenPipeError:
        return _reader_left()
    except OSError as failure:
        return _fail(_operating_system_error(failure))
    except Exception as failure:  # of a library, of any class; every other one is a fault of ours
        if not out_of_memory(failure):
            raise
        return _fail(
            MissingRequirement("out of memory: close other programs or take a smaller model")
        )


def _print_whatever_comes() -> None:
    """A terminal or pipe that is not UTF-8 gets `?` for what it cannot show, and no exception."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # not every stand-in for stdout has it
    if reconfigure is not None:
        reconfigure(errors="replace")


def _fail(failure: EdgepoolError) -> int:
    console.error(str(failure))
    return failure.exit_code


def _usage_message(failure: Any) -> str:
    message = " ".join(failure.format_message().split()).rstrip(".")
    context = getattr(failure, "ctx", None)
    command = context.command_path if context is not None else "edgepool"
    return "%s (see '%s --help')" % (message[:1].lower() + message[1:], command)


def _reader_left() -> int:
    """`edgepool targets | head -1`: stop quietly; Python would flush again as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _missing_module(failure: ModuleNotFoundError) -> EdgepoolError:
    module = (failure.name or "").split(".")[0]
    if module not in EXTRA_OF_MODULE:
        raise failure
    return MissingRequirement(
        "the Python package '%s' is not installed: pip install 'edgepool[%s]'"
        % (module, EXTRA_OF_MODULE[module])
    )


def _operating_system_error(failure: OSError) -> EdgepoolError:
    """A full disk, a missing or forbidden path; anything else is a fault of ours and is raised."""
    where = "%s: " % failure.filename if failure.filename is not None else ""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return BadInput("%sno space left on the disk: free some, or write elsewhere" % where)
    if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return BadInput("%spermission denied: choose a path that you may use" % where)
    if not where or failure.strerror is None:
        raise failure
    return BadInput(where + failure.strerror[:1].lower() + failure.strerror[1:])
