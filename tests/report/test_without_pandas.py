"""pandas is optional: only ``History.to_frame`` needs it, and says how to install it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import fedalign as fa

RUN = """
import sys
sys.modules["pandas"] = None
from fedalign.cli import main
sys.exit(main("run synth-low --rounds 2 --seeds 1 --quiet --device cpu --out out".split()))
"""


def test_to_frame_says_how_to_install_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fa.FedalignError, match=r"pip install 'fedalign\[pandas\]'"):
        fa.History().to_frame()


@pytest.mark.slow
def test_a_run_and_its_report_do_without_pandas(tmp_path):
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, check=True, env=environment)
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
