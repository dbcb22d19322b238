"""The notebooks run, and are stored as they ran: with outputs, without errors, and without folders of a machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
PATHS = re.compile(r"/(?:home|root|tmp|work|Users|private|var)/|[A-Z]:\\\\")


def code_cells(name):
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_three():
    assert NOTEBOOKS == ["compare-rules.ipynb", "deployment.ipynb", "own-data.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name):
    command = [sys.executable, "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_as_it_ran(name):
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 5
    assert not [output for output in outputs if output["output_type"] == "error"]
    for output in outputs:
        shown = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
        assert not PATHS.search(json.dumps([shown, output.get("text")], ensure_ascii=False))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_small(name):
    assert (FOLDER / name).stat().st_size < 600_000
