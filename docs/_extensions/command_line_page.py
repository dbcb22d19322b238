"""The command-line reference is written from the parser itself, so it can't go stale.

The marker ``<!-- commands -->`` in a page becomes a section for every command, with its usage and its options.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from fedalign.cli import command_line

MARKER = "<!-- commands -->"
COLUMNS = "100"  # of the usage lines


def commands(parser: argparse.ArgumentParser, summary: str = "") -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Give every parser that runs something, in the order of the help, with the line that the help has about it."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser, summary
    for action in nested:
        about = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            yield from commands(command, about.get(name, ""))


def reference() -> str:
    """Write the section of every command."""
    os.environ["COLUMNS"] = COLUMNS  # argparse wraps usage lines at this width
    return "\n\n".join(_section(command, about) for command, about in commands(command_line.make_parser()))


def _section(command: argparse.ArgumentParser, about: str) -> str:
    usage = re.sub(r" \[.h\]", "", command.format_usage().removeprefix("usage: ").rstrip())  # every command has --help
    rows = [_row(action) for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    about = _text(command.description or about)
    parts = [f"## `{command.prog}`", about[:1].upper() + about[1:], f"```text\n{usage}\n```"]
    if rows:
        parts.append("\n".join(["| argument | |", "|---|---|", *rows]))
    if command.epilog:
        parts.append(_text(command.epilog))
    return "\n\n".join(part for part in parts if part)


def _row(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = value if isinstance(value, str) else " ".join(value)
    takes = f" {value}" if action.nargs != 0 else ""
    names = ", ".join(f"`{option}{takes}`" for option in action.option_strings) or f"`{value}`"
    words = (action.help or "") % {**vars(action), "prog": "fedalign"} if action.help else ""
    return f"| {_cell(names)} | {_cell(_text(words))} |"


def _text(words: str) -> str:
    """Keep Markdown from reading signs of the help texts."""
    return words.replace("*", r"\*").replace("<", r"\<")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, reference())


def _always_read(app: Sphinx, env: BuildEnvironment, *documents: set[str]) -> list[str]:
    return ["command-line"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the marker to Sphinx's reading of pages."""
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _always_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
