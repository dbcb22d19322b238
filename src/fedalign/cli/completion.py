"""``fedalign completion``: scripts that let a shell complete commands, options and names of experiments."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands

Words = dict[tuple[str, ...], dict[str, str]]  # by the subcommands so far: what may follow, with its help

_BASH = """\
_fedalign() {{
    local path="" words="" word i cur="${{COMP_WORDS[COMP_CWORD]}}"
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        case "$path/$word" in
            {commands}) path="$path/$word" ;;
        esac
    done
    case "$path" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
}}
complete -o filenames -F _fedalign fedalign
"""
_ZSH = "autoload -Uz +X compinit && compinit\nautoload -Uz +X bashcompinit && bashcompinit\n"


def add(commands: Subcommands) -> None:
    """Add ``completion`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("completion", help="print a script for your shell that completes fedalign's words")
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    command.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    from fedalign.cli.command_line import make_parser

    words = words_of(make_parser())
    sys.stdout.write(fish(words) if options.shell == "fish" else (_ZSH * (options.shell == "zsh")) + bash(words))
    return 0


def words_of(parser: argparse.ArgumentParser) -> Words:
    """Collect what may follow each subcommand: options, further subcommands, choices and names."""
    from fedalign.experiments.config import shipped

    experiments = shipped()
    found: Words = {}

    def visit(path: tuple[str, ...], one: argparse.ArgumentParser) -> None:
        here = found.setdefault(path, {})
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
                for name, inner in action.choices.items():
                    here[name] = helps.get(name, "")
                    visit((*path, name), inner)
            elif action.option_strings:
                here |= {text: action.help or "" for text in action.option_strings if text.startswith("--")}
            elif action.choices:
                here |= dict.fromkeys(map(str, action.choices), "")
            if action.metavar == "NAME|FILE.toml":
                here |= experiments

    visit((), parser)
    return found


def bash(words: Words) -> str:
    """Write the script for bash; zsh reads it, too."""
    commands = "|".join(shlex.quote("/" + "/".join(path)) for path in words if path)
    cases = "\n".join(
        f"        {shlex.quote(''.join('/' + name for name in path))}) words={shlex.quote(' '.join(following))} ;;"
        for path, following in words.items()
    )
    return _BASH.format(commands=commands, cases=cases)


def fish(words: Words) -> str:
    """Write the script for fish."""
    return "".join(_fish_lines(words))


def _fish_lines(words: Words) -> Iterator[str]:
    for path, following in words.items():
        inside = " and ".join(f"__fish_seen_subcommand_from {name}" for name in path) or "__fish_use_subcommand"
        further = [name for name in following if (*path, name) in words]
        if path and further:
            inside += f" and not __fish_seen_subcommand_from {' '.join(further)}"
        inside = inside.replace(" and ", "; and ")
        for word, text in following.items():
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {shlex.quote(word)}"
            said = f" -d {shlex.quote(text)}" if text else ""
            yield f"complete -c fedalign -n {shlex.quote(inside)} {what}{said}\n"
