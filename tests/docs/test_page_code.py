"""Every page's code runs: that of pages without a test of their own is run here, and no page is left out."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import blobs

import fedalign as fa
from fedalign import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
RUN_HERE = {"docs/index.md", "docs/tutorial.md", "docs/guide.md", "docs/rules.md"}
RUN_ELSEWHERE = {
    "README.md": "test_docs.py",
    "docs/architecture.md": "test_architecture.py",
    "docs/metrics.md": "test_metrics_pages.py",
    "docs/models.md": "test_own_data.py",
    "docs/tracking.md": "test_metrics_pages.py",
}
SHORTER = ("--rounds", "6", "--seeds", "2", "--device", "cpu", "--quiet")  # added to the tutorial's runs


def blocks(page, language):
    """Give a page's code blocks of a language; those in lists are indented."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def commands(page):
    """Give the arguments of a page's fedalign commands, without comments and redirections."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "fedalign":
                found.append(words[1 : words.index(">") if ">" in words else None])
    return found


def test_no_page_is_left_out():
    with_python = {page for page in PAGES if blocks(page, "python")}
    assert with_python == RUN_HERE | set(RUN_ELSEWHERE)
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (Path(__file__).parent / test).read_text(encoding="utf-8").replace("PAGE", page)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_exist(page):
    for arguments in commands(page):
        cli.command_line.make_parser().parse_args(arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")])
def test_the_settings_of_a_page_are_toml(page):
    for block in blocks(page, "toml"):
        assert tomllib.loads(block)


def test_the_first_page_runs(capsys):
    (block,) = blocks("docs/index.md", "python")
    exec(block, {})
    out = capsys.readouterr().out
    assert out == "['trained', 'admitted', 'admitted', 'declined']\n"


@pytest.mark.slow
def test_the_tutorial_runs(capsys):
    first, second, *rest = commands("docs/tutorial.md")
    assert cli.main([*first, *SHORTER]) == 0
    assert cli.main([*second, *SHORTER]) == 0
    for arguments in rest:
        assert cli.main([*arguments, *(SHORTER if arguments[0] == "run" else [])]) == 0
    assert Path("runs/compared/report.html").is_file()
    capsys.readouterr()
    names: dict[str, object] = {}
    for block in blocks("docs/tutorial.md", "python"):
        exec(block, names)
    out = capsys.readouterr().out
    assert "free-0 " in out
    assert "accuracy %" in out
    assert "free clients were admitted in the last round" in out


def test_the_rule_of_the_page_on_rules_runs():
    names: dict[str, object] = {}
    exec(blocks("docs/rules.md", "python")[0], names)
    draw = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 200, 6, generator=draw), torch.randn(6, 4, generator=draw)
    fed = fa.Federation.from_arrays([(one, (one @ weights).argmax(1)) for one in x], priority=[True, *[False] * 4])
    result = fa.simulate(fed, lambda: torch.nn.Linear(6, 4), names["AtLeastAsGood"](), rounds=10)
    assert {c.decision for record in result.history.rounds for c in record.clients} >= {"trained", "admitted"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_python_of_the_guide_runs():
    """Files have a test of their own; the other parts use the names that the page's text gives them."""
    x, labels = blobs(240, 0)
    np.save("images.npy", (np.asarray(x) * 10).astype(np.uint8))
    parts, test_parts = list(np.arange(160).reshape(4, 40)), list(np.arange(160, 240).reshape(4, 20))
    names = {"fa": fa, "np": np, "labels": labels, "parts": parts, "test_parts": test_parts}
    names |= {"priority": [True, True, False, False], "model": lambda: torch.nn.Linear(6, 4)}
    run = [block for block in blocks("docs/guide.md", "python") if not block.startswith("# ")]
    assert len(run) >= 5
    for block in run:
        exec(re.sub(r"rounds=\d+", "rounds=3", block), names)
    assert Path("runs/wide/report.html").is_file()
    assert Path("runs/mine/rounds.jsonl").is_file()
