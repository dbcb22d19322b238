from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.report import plot_style

settings.register_profile("fedalign", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("fedalign")


def blobs(
    n: int, seed: int, *, shift: float = 0.0, features: int = 6, classes: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Samples of a shared linear task; ``shift`` rotates the labels of that share of the samples."""
    draw = np.random.default_rng(seed)
    W = np.random.default_rng(999).normal(size=(features, classes))
    x = draw.normal(size=(n, features)).astype(np.float32)
    y = (x @ W).argmax(1)
    wrong = draw.random(n) < shift
    return x, np.where(wrong, (y + 1) % classes, y)


def federation(
    sizes: Sequence[int] = (40, 25, 60, 33, 18),
    priority: Sequence[bool] = (True, True, False, False, False),
    shifts: Sequence[float] = (0.15, 0.15, 0, 0.5, 1.0),
    **options: object,
) -> fa.Federation:
    train = [blobs(n, 10 + k, shift=s) for k, (n, s) in enumerate(zip(sizes, shifts, strict=True))]
    test = [blobs(50, 50 + k, shift=s) for k, s in enumerate(shifts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fa.FederationWarning)
        return fa.Federation.from_arrays(train, test=test, priority=priority, **options)  # type: ignore[arg-type]


def linear() -> torch.nn.Module:
    return torch.nn.Linear(6, 4)


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in module.state_dict().values()])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Run every test in an empty folder, so that nothing is written into the checkout."""
    monkeypatch.chdir(tmp_path)


@functools.cache
def blank(suffix):
    """Give the bytes of a picture of nothing."""
    file = io.BytesIO()
    Figure(figsize=(1, 1)).savefig(file, format=suffix.removeprefix("."))
    return file.getvalue()


@pytest.fixture(autouse=True)
def _blank_pictures(request, monkeypatch):
    """Render no pictures, which takes most of a short run's time; tests of pictures have the mark ``pictures``."""

    def save(figure, path, suffixes=(".png", ".pdf")):
        targets = [path.with_name(path.name + suffix) for suffix in suffixes]
        for target in targets:
            target.write_bytes(blank(target.suffix))
        return targets

    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr(plot_style, "save", save)


@contextlib.contextmanager
def interrupted_before(monkeypatch, round):
    """Interrupt a run, as Ctrl-C does, when it is about to store a round."""
    append = RunStore.append

    def stop(self, record):
        if record.round == round:
            raise KeyboardInterrupt
        return append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append", stop)
        yield


def assert_resumes_alike(monkeypatch, folder, settings, round):
    """Run to the end; run again, interrupted before a round, and resume: all files must be the same to the byte."""
    whole, cut = folder / "whole", folder / "cut"
    assert main([*settings, "--out", str(whole)]) == 0
    with interrupted_before(monkeypatch, round):
        assert main([*settings, "--out", str(cut)]) == 130
    assert main([*settings, "--out", str(cut), "--resume"]) == 0
    files = [p.relative_to(whole) for p in whole.rglob("*") if p.name in ("rounds.jsonl", "model.safetensors")]
    assert files
    for file in files:
        assert (cut / file).read_bytes() == (whole / file).read_bytes(), file
