"""Without a terminal a run says how far it is in plain lines; ``python -m fedalign`` and completion work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from fedalign import cli
from fedalign.cli import completion, plain_lines
from fedalign.cli.command_line import make_parser
from fedalign.cli.plain_lines import PlainLines


def test_lines_are_printed_every_so_often(capsys):
    now = [0.0]
    lines = PlainLines(lambda: now[0])
    for second in range(0, 200, 5):
        now[0] = float(second)
        lines.show(second, 400, lambda second=second: f"round {second}")
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["round 10; 0:10, about 6:30 left", "round 20; 0:20, about 6:20 left"]
    assert [line.split(";")[0] for line in shown[5:]] == ["round 110", "round 170"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "synth-low", "--rounds", "3", "--seeds", "1", "--arms", "priority,all"],
        ["sweep", "synth-low", "--rounds", "3", "--seeds", "1", "--arms", "priority", "--set", "local.lr=0.1,0.2"],
        [
            "redteam",
            "trust-synth",
            "--rounds",
            "2",
            "--seeds",
            "1",
            "--attacks",
            "zero",
            "--fractions",
            "0.5",
            "--rules",
            "all",
        ],
    ],
)
def test_commands_print_lines_without_a_terminal_and_none_quietly(command, capsys, monkeypatch):
    monkeypatch.setattr(plain_lines, "_OFTEN", 0.0)
    assert cli.main([*command, "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert {"run": "round 2 of 3: priority ", "sweep": "best so far: priority ", "redteam": "% of all rounds"}[
        command[0]
    ] in said
    assert cli.main([*command, "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_python_m_fedalign():
    done = subprocess.run([sys.executable, "-m", "fedalign", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fedalign ")


def completed(script, line):
    """Let bash complete the last word of a line."""
    words = line.split(" ")
    code = f"{script}\nCOMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _fedalign; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_experiments(capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "fedalign sw") == ["sweep"]
    assert completed(script, "fedalign run synth-m") == ["synth-medium"]
    assert completed(script, "fedalign run synth-low --ar") == ["--arms"]
    assert completed(script, "fedalign flower roster a") == ["add"]
    assert completed(script, "fedalign data ge") == ["get"]
    assert completed(script, "fedalign completion z") == ["zsh"]


def test_zsh_and_fish(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("__fish_use_subcommand" in line and "-a sweep" in line for line in lines)
    assert "complete -c fedalign -n '__fish_seen_subcommand_from run' -l arms -d 'the arms to compare'" in lines
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input="\n".join(lines), text=True, check=True, env=dict(os.environ))
    assert cli.main(["completion", "tcsh"]) == 2


def test_every_option_of_every_command_can_be_completed():
    words = completion.words_of(make_parser())
    assert {"run", "sweep", "redteam", "report", "completion"} <= words[()].keys()
    assert {"--set", "--resume", "--seeds", "synth-low"} <= words["sweep",].keys()
