"""Draw README's picture from the summaries in ``docs/results/rules``: how much free clients help or harm.

``python benchmarks/headline.py`` writes ``docs/img/headline.png``. The summaries name the commands that they come from.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedalign.report import plot_style

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "img" / "headline.png"
TASKS = {
    "synth-high": "Synth, high noise",
    "synth-medium": "Synth, medium noise",
    "synth-low": "Synth, low noise",
    "fmnist": "Fashion-MNIST, 2 of 60",
    "various-fmnist-6": "Fashion-MNIST, 6 of 60",
    "cifar10": "CIFAR-10, 2 of 60",
    "emnist": "EMNIST-47 (redrawn), 2 of 60",
    "various-emnist-9": "EMNIST-47 (redrawn), 9 of 60",
    "various-emnist-18": "EMNIST-47 (redrawn), 18 of 60",
}
ARMS = {
    "all": ("all: train on everybody", "s"),
    "fedalign": ("fedalign, ε = 0.2", "o"),
    "auto": ("auto: AutoALIGN", "D"),
}


def leads() -> dict[str, dict[str, float]]:
    """Return by how many points of test accuracy each arm is above ``priority``, by task."""
    found = {}
    for task in TASKS:
        arms = json.loads((ROOT / "docs" / "results" / "rules" / f"{task}.json").read_text(encoding="utf-8"))["arms"]
        mean = {arm: 100 * arms[arm]["test_accuracy"]["mean"] for arm in ("priority", *ARMS)}
        found[task] = {arm: mean[arm] - mean["priority"] for arm in ARMS}
    return found


def draw(path: Path) -> None:
    """Draw a row for each task and a marker for each arm; the line at 0 is FedAvg on the priority clients."""
    figure, axis = plot_style.figure_of("Free clients help or harm, task by task")
    figure.set_size_inches(plot_style.TEXT, 2.9)
    found = leads()
    for place, task in enumerate(reversed(TASKS)):
        axis.hlines(place, min(found[task].values()), max(found[task].values()), color="0.8", linewidth=1, zorder=1)
    for index, (arm, (label, marker)) in enumerate(ARMS.items()):
        values = [found[task][arm] for task in reversed(TASKS)]
        look = {"s": 60 if arm == "auto" else 22, "c": plot_style.colour(arm, index), "marker": marker}
        axis.scatter(values, range(len(TASKS)), label=label, zorder=5 - index, **look)
    axis.axvline(
        0, color=plot_style.colour("priority", 0), linewidth=2, label="priority: on the priority clients alone"
    )
    axis.set_yticks(range(len(TASKS)), list(reversed(TASKS.values())))
    axis.set_xlabel("test accuracy of the priority clients, in points above (or below) training on them alone")
    plot_style.legend_above(figure, axis, columns=4)
    plot_style.save(figure, path.with_suffix(""), (".png",))


if __name__ == "__main__":
    draw(PICTURE)
    print(PICTURE.relative_to(ROOT))
