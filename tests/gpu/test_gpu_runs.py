"""Whole runs on a GPU: the decisions are those of the CPU's reference, and a resumed run equals an undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import MODELS, engines, full_precision, on_devices

import fedalign as fa
from fedalign.data.synth import Synth
from fedalign.training import models

__all__ = ["full_precision"]


@on_devices
def test_decisions(device):
    fed = Synth(label_skew=0.5, random_skew=0.5).federation(0)
    # A rate at which the task is stable: at 0.1 it amplifies the last bit to another model within ten rounds.
    local = fa.LocalSGD(lr=0.005, epochs=1, batch_size=50)
    both = [
        fa.simulate(
            fed, lambda: models.logistic(60, 10), fa.Align(0.2), 10, 0.1, local, device=where, engine=engine
        ).history
        for where, engine in (("cpu", "reference"), (device, "batched"))
    ]
    for a, b in zip(both[0].rounds, both[1].rounds, strict=True):
        assert [c.decision for c in a.clients] == [c.decision for c in b.clients]
        assert a.global_loss == pytest.approx(b.global_loss, abs=1e-4)


@on_devices
def test_a_dropout_model_trains_alike_twice(device):
    make, shape = MODELS["dropout cnn"]
    fed, *_ = engines(make, shape, device)
    ends = [
        fa.simulate(fed, make, fa.Everyone(), 2, 0, fa.LocalSGD(lr=0.05, epochs=1), device=device).model.state_dict()
        for _ in range(2)
    ]
    for name, tensor in ends[0].items():
        if device == "cpu":
            assert torch.equal(tensor, ends[1][name]), name
        else:  # cuDNN may add up in another order; other masks would differ by far more
            assert torch.allclose(tensor, ends[1][name], atol=1e-5), name


#: a process sends itself the signal of Ctrl-C when it stores round 10, however fast or loaded the machine is
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore Ctrl-C
from fedalign.experiments.store import RunStore
append = RunStore.append
def stop(self, record):
    if record.round == 10:
        os.kill(os.getpid(), signal.SIGINT)
    return append(self, record)
RunStore.append = stop
"""


def fedalign(folder, device, *options, before=""):
    """Run the command line in a process of its own, and return its exit code."""
    command = before + "import sys; from fedalign.cli import main; sys.exit(main(sys.argv[1:]))"
    settings = ["synth-low", "--rounds", "30", "--arms", "fedalign,all", "--seeds", "1", "--device", device, "--quiet"]
    # The process runs in another folder, so paths that are relative to this one must be made absolute.
    paths = [Path(fa.__file__).parent.parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return subprocess.run(
        [sys.executable, "-c", command, "run", *settings, "--out", str(folder), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths)},
        cwd=folder.parent,
        check=False,
    ).returncode


@on_devices
def test_resumed_equals_undisturbed(device, tmp_path):
    for name in ("rich", "safetensors", "matplotlib"):
        pytest.importorskip(name, reason=f"fedalign run needs {name}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert fedalign(whole, device) == 0
    assert fedalign(cut, device, before=INTERRUPTED) == 130
    assert fedalign(cut, device, "--resume") == 0
    files = [p.relative_to(whole) for p in whole.rglob("*") if p.name in ("rounds.jsonl", "model.safetensors")]
    assert files
    for file in files:
        assert (cut / file).read_bytes() == (whole / file).read_bytes(), file
