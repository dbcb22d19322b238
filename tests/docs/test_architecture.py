"""The extensions of docs/architecture.md run as they stand in the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

from fedalign import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def files():
    """Give the page's files: code blocks whose first line names one."""
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return {name: text.lstrip("\n") for name, text in blocks}


def test_the_four_extensions_run_together(tmp_path, capsys):
    found = files()
    assert set(found) == {"half.py", "test_half.py", "geometric.py", "rotated.py", "csv_tracker.py", "extended.toml"}
    for name, text in found.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    run = ["run", str(tmp_path / "extended.toml"), "--out", str(out), "--device", "cpu"]
    assert cli.main(run) == 0
    assert "half" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["arms"]["half"]["admitted_mean"] > 0
    rows = (out / "half" / "seed-1" / "curve.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows] == list(range(6))
    assert (out / "report.html").is_file()
    assert cli.main([*run, "--resume", "--quiet"]) == 0
    assert cli.main([*run[:2], "--out", str(tmp_path / "b"), "--set", "arm.half.share=2", "--quiet"]) == 2
    assert "share must be from 0 to 1, not 2" in capsys.readouterr().err


def test_the_rule_is_tested_with_made_up_clients(tmp_path):
    for name in ("half.py", "test_half.py"):
        (tmp_path / name).write_text(files()[name], encoding="utf-8")
    subprocess.run([sys.executable, "test_half.py"], cwd=tmp_path, check=True)


def test_each_extension_is_about_twenty_lines():
    for name, text in files().items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 24, name
