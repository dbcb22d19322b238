"""Compact summaries of runs: small enough to commit, with all that the figures and the claims need."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign import __version__
from fedalign.errors import FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.protocol.records import History, mean_or_none
from fedalign.report.read_runs import RunFolder

_SMOOTH = 5  # rounds to average over: one lucky round does not count as having reached an accuracy


def compact(run: RunFolder, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Summarise a finished run: final figures by seed, curves, and the rounds needed to reach `priority`.

    Curves are means and standard deviations over seeds. ``others`` are the arms of an earlier summary, which provides
    `priority` if the run has no such arm.
    """
    summary = run.summary
    priority = summary["arms"].get("priority") or (others or {}).get("priority")
    finals = priority["test_accuracy"]["per_seed"] if priority else [None] * len(summary["seeds"])
    targets = dict(zip(summary["seeds"], finals, strict=True))
    arms = {}
    for arm, figures in summary["arms"].items():
        histories = run.histories[arm]
        arms[arm] = {
            "test_accuracy": figures["test_accuracy"],
            "admitted_mean": figures["admitted_mean"],
            "models_up": figures["models_up"],
            "models_down": figures["models_down"],
            "alone": figures["alone"],
            "diverged": figures["diverged"],
            "rounds_to_priority": [rounds_to_reach(histories[seed], targets.get(seed)) for seed in summary["seeds"]],
            "curves": {name: _curve(histories, name) for name in ("test_accuracy", "train_loss")},
        }
    return {
        "experiment": summary["experiment"],
        "description": run.settings["description"],
        "data": data_name(run.settings["data"]),
        "command": _command(run.settings),
        "rounds": summary["rounds"],
        "warmup": run.settings["warmup"],
        "seeds": summary["seeds"],
        "device": summary["device"] + (", TF32" if run.settings.get("tf32") else ""),
        "seconds": summary["seconds"],
        "fedalign": __version__,
        "arms": arms,
        "incentive": summary.get("incentive", {}),
    }


def data_name(data: Mapping[str, Any]) -> str:
    """Return the title of the data that a run used; files other than the official ones are named after their folder."""
    titles = {"fmnist": "Fashion-MNIST", "emnist": "EMNIST (balanced)", "cifar10": "CIFAR-10", "synth": "Synth"}
    kind, folder = str(data["kind"]), data.get("folder")
    if folder is None:
        return titles.get(kind, kind)
    name = Path(folder).name
    return "EMNIST-47 (redrawn)" if name == "emnist47-redrawn" else f"{kind} files of {name}"


def _command(settings: Mapping[str, Any]) -> str:
    """Return the command that repeats a run; a data folder appears by name, as in FEDALIGN_DATA, without its path."""
    words = ["fedalign run", str(settings["name"]), "--arms", ",".join(settings["arms"])]
    for name, usual in (("rounds", 200), ("seeds", 5)):
        if settings[name] != usual:
            words += [f"--{name}", str(settings[name])]
    if settings.get("tf32"):
        words.append("--tf32")
    if settings["data"].get("folder"):
        words += ["--set", f"data.folder={Path(settings['data']['folder']).name}"]
    return " ".join(words)


def rounds_to_reach(history: History, target: float | None) -> int | None:
    """Return the rounds until the mean test accuracy of 5 rounds reaches ``target``; None if it never does."""
    if target is None:
        return None
    values = [r.test_accuracy for r in history.rounds]
    for end in range(_SMOOTH, len(values) + 1):
        window = [v for v in values[end - _SMOOTH : end] if v is not None]
        if window and sum(window) / len(window) >= target - 1e-9:
            return end
    return None


def save(results: Mapping[str, Any], folder: Path) -> Path:
    """Write a compact summary to ``EXPERIMENT.json`` in ``folder``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results['experiment']}.json"
    write_atomically(path, json.dumps(results, separators=(",", ":"), allow_nan=False) + "\n")
    return path


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Read all compact summaries of a folder, by experiment.

    Raises :class:`FedalignError` if there are none, or if a file is not a summary.
    """
    if not folder.is_dir():
        raise FedalignError(f"there is no folder {folder}")
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            found[str(results["experiment"])] = results
        except (ValueError, KeyError, TypeError) as error:
            raise FedalignError(f"{path} is not a summary of a run: {error}") from error
    if not found:
        raise FedalignError(f"folder {folder} holds no summaries (NAME.json)")
    return found


def _curve(histories: Mapping[int, History], name: str) -> dict[str, list[float | None]]:
    longest = max((len(h) for h in histories.values()), default=0)
    columns: list[list[float]] = [
        [float(v) for h in histories.values() if r < len(h) and (v := getattr(h[r], name)) is not None]
        for r in range(longest)
    ]
    return {"mean": [_rounded(mean_or_none(c)) for c in columns], "std": [_rounded(_std(c)) for c in columns]}


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return 0.0 if values else None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
