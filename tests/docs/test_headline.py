"""README's headline figures, its table and its picture come from the committed summaries."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def headline(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("headline")


def test_the_sentence_has_the_summaries_figures(headline):
    leads = {arm: [task[arm] for task in headline.leads().values()] for arm in headline.ARMS}
    sentence = re.search(r"from −([\d.]+) to \+([\d.]+) points.*?from ([\d.]+) to ([\d.]+) points", README, re.DOTALL)
    expected = (-min(leads["all"]), max(leads["all"]), min(leads["auto"]), max(leads["auto"]))
    assert sentence.groups() == tuple(f"{figure:.1f}" for figure in expected)
    caption = re.search(r"!\[(.*?)\]\(docs/img/headline.png\)", README)[1]
    for arm in headline.ARMS:
        for figure in (min(leads[arm]), max(leads[arm])):
            assert f"{abs(figure):.1f}" in caption or figure < 0.15


def test_the_table_has_the_summaries_figures(headline):
    columns = ("fmnist", "various-fmnist-6", "emnist", "various-emnist-9", "various-emnist-18", "cifar10")
    table = README.partition("| arm | Fashion-MNIST, 2 of 60 |")[2].partition("\n\n")[0]
    for arm in headline.ARMS:
        row = next(line for line in table.splitlines() if line.startswith(f"| `{arm}`"))
        base = next(line for line in table.splitlines() if line.startswith("| `priority`"))
        cells = [[float(cell) for cell in re.findall(r"\d+\.\d", line.partition(" | ")[2])] for line in (row, base)]
        for task, own, priority in zip(columns, *cells, strict=True):
            assert own - priority == pytest.approx(headline.leads()[task][arm], abs=0.11)


@pytest.mark.pictures
def test_the_picture_can_be_drawn(headline, tmp_path):
    headline.draw(tmp_path / "headline.png")
    assert (tmp_path / "headline.png").stat().st_size > 20_000
    assert headline.PICTURE.is_file()
