"""The Python of the pages about metrics, callbacks and trackers runs as it stands, and their settings are valid."""

import re
import tomllib
from pathlib import Path

import pytest

from fedalign.experiments.config import load
from fedalign.registry import METRICS, TRACKERS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_python_of_the_page_on_metrics_runs(capsys):
    names: dict[str, object] = {}
    for block in blocks("metrics.md", "python"):
        exec(block, names)
    assert "stopped after round" in capsys.readouterr().out
    assert Path("runs/best/best.safetensors").is_file()


def test_the_python_of_the_page_on_trackers_runs():
    pytest.importorskip("tensorboard")
    for block in blocks("tracking.md", "python"):
        exec(block, {})
    assert list(Path("runs/mine/tensorboard").glob("events*"))


def test_the_settings_of_the_pages_are_valid(tmp_path):
    (tmp_path / "mine.py").write_text("def worst_class(outputs, targets):\n    return 0.5\n")
    first, second = blocks("metrics.md", "toml")
    pytest.importorskip("torchmetrics")
    for text in (first, second):
        experiment = load("synth-low", tomllib.loads(text), tmp_path)
        assert experiment.metrics
    assert len(experiment.make_callbacks()) == 2
    (track,) = blocks("tracking.md", "toml")
    assert len(load("synth-low", tomllib.loads(track)).trackers) == 3


def test_the_pages_name_all_built_ins():
    metrics, tracking = ((DOCS / page).read_text(encoding="utf-8") for page in ("metrics.md", "tracking.md"))
    assert not [name for name in METRICS.entries if not re.search(rf"`{name}[`(]", metrics)]
    assert not [name for name in TRACKERS.entries if f"`{name}(" not in tracking]
