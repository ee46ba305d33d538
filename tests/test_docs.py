"""The documents agree with the code: commands, options, messages, links and make targets exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from edgepool.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for folder in (".", "docs", "jetson") for path in ROOT.glob(folder + "/*.md"))
GROUP = typer.main.get_command(app)


def options_of(command: str) -> set[str]:
    parameters = GROUP.commands[command].params if command else GROUP.params
    return {"--help"}.union(*(p.opts for p in parameters if p.param_type_name == "option"))


def code_lines(text: str) -> list[str]:
    """The lines of the fenced and indented code blocks, joined where they end in a backslash."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^    .*", text, re.MULTILINE)
    return [line.strip() for line in "\n".join(blocks).replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_examples_exist(page: Path) -> None:
    for line in code_lines(page.read_text()):
        line = line[2:] if line.startswith("$ ") else line
        if not re.match(r"edgepool( [-a-z]|$)", line):
            continue
        words = shlex.split(line, comments=True)
        command = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
        assert not command or command in COMMANDS, line
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options_of(command), line


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_page_lists_every_option(command: str) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    section = re.search(r"^## edgepool %s\n(.*?)(?=^## |\Z)" % command, page, re.M | re.S)
    assert section is not None
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", section.group(1)))
    assert options_of(command) - {"--help", "-o"} <= listed
    assert listed - {"-o"} <= options_of(command)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in sorted(ROOT.glob("edgepool/**/*.py")))
    # A message may be split over adjacent string literals.
    source = re.sub(r"\"\s*f?\"", "", source)
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert headings
    for heading in headings:
        for piece in heading.split("..."):
            assert piece.strip() in source, heading


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert target in targets
