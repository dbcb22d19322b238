"""The tables of a run's results, for the terminal and the HTML page: a row for each arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedalign.report.figures import Shown, shown

SUCCESS = "backdoor %"
HEADINGS = ("arm", "accuracy %", "loss", "admitted", "models up", "models down")
NOTE = "Bold: the best shared model. Arms that train a model for each client (local) are not ranked."
INCENTIVE = ("arm", "shared model %", "local model %", "better off", "free clients")
INCENTIVE_TITLE = "Is a free client better off with the shared model than training alone?"
INCENTIVE_NOTE = "Accuracy of free clients on their own test data after the last round: mean over clients and seeds."


def headings(summary: dict[str, Any]) -> tuple[str, ...]:
    """Return the headings of the cells that :func:`rows` gives: a backdoor's success only where there is one."""
    found = HEADINGS
    if (keys := shown(summary)).split != "test":
        found = (HEADINGS[0], f"{keys.words} %", f"{keys.words} loss", *HEADINGS[3:])
    return (*found, SUCCESS) if _has_backdoor(summary) else found


def note(summary: dict[str, Any]) -> str:
    """Return what to read below the table: what is bold and, without test data, how to add some.

    Experiments on the theory have no test data on purpose.
    """
    advice = None if "theory" in summary else shown(summary).advice
    return f"{NOTE} {advice}" if advice else NOTE


def rows(summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the cells of each arm as text, and last whether the arm has the best shared model.

    ``summary`` is the content of ``summary.json``. The best model has the highest test accuracy or, if there are no
    accuracies, the lowest test loss. Without test data, figures are those on held-out data.
    """
    arms: dict[str, Any] = summary["arms"]
    keys = shown(summary)
    best = _best(arms, keys)
    nothing: dict[str, Any] = {"mean": None, "std": None, "per_seed": []}
    return [
        (
            arm,
            spread(figures.get(keys.accuracy, nothing), 100, 1),
            spread(figures[keys.loss], 1, 3),
            _number(figures["admitted_mean"], 1),
            _number(figures["models_up"], 0),
            _number(figures["models_down"], 0),
            *([spread(figures.get("attack_success", nothing), 100, 1)] if _has_backdoor(summary) else []),
            arm == best,
        )
        for arm, figures in arms.items()
    ]


def terminal_table(summary: dict[str, Any]) -> Table:
    """Draw the results of all arms for a terminal, the best shared model in bold."""
    seeds = len(summary["seeds"])
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    data = shown(summary).words.capitalize()
    caption = f"{data} data of the priority clients, last 10 rounds, {over}. {note(summary)}"
    table = Table(title=f"{summary['experiment']}, {summary['rounds']} rounds", caption=caption)
    # With a backdoor's success, the costs have no room in a terminal of 80 columns.
    kept = [(n, text) for n, text in enumerate(headings(summary)) if not (_has_backdoor(summary) and "models" in text)]
    for index, heading in kept:
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for *cells, best in rows(summary):
        table.add_row(*[str(cells[index]) for index, _ in kept], style="bold green" if best else None)
    return table


def incentive_rows(summary: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return, for each arm, the free clients' accuracy with the shared model and with their local models.

    The list is empty if the run has no ``local`` arm to compare with.
    """
    return [
        (arm, f"{100 * f['shared']:.1f}", f"{100 * f['own']:.1f}", f"{f['better_off']:.1f}", f"{f['free']:.0f}")
        for arm, f in summary.get("incentive", {}).items()
    ]


def incentive_table(summary: dict[str, Any]) -> Table | None:
    """Draw what free clients gain from the federation, for a terminal; None without a ``local`` arm."""
    found = incentive_rows(summary)
    if not found:
        return None
    table = Table(title=INCENTIVE_TITLE, caption=INCENTIVE_NOTE)
    for index, heading in enumerate(INCENTIVE):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in found:
        table.add_row(*cells)
    return table


def _has_backdoor(summary: dict[str, Any]) -> bool:
    return any("attack_success" in figures for figures in summary["arms"].values())


def _best(arms: dict[str, Any], keys: Shown) -> str | None:
    arms = {arm: figures for arm, figures in arms.items() if not figures["alone"]}
    accuracies = {arm: f.get(keys.accuracy, {}).get("mean") for arm, f in arms.items()}
    by_accuracy = {arm: accuracy for arm, accuracy in accuracies.items() if accuracy is not None}
    if by_accuracy:
        return max(by_accuracy, key=lambda arm: by_accuracy[arm])
    by_loss = {a: f[keys.loss]["mean"] for a, f in arms.items() if f[keys.loss]["mean"] is not None}
    return min(by_loss, key=lambda arm: by_loss[arm]) if by_loss else None


def spread(figure: Mapping[str, Any], scale: float, digits: int) -> str:
    """Write a figure's mean and, over several seeds, its standard deviation.

    >>> spread({"mean": 0.8125, "std": 0.01, "per_seed": []}, 100, 1), spread({"mean": 0.5, "std": None}, 1, 3)
    ('81.2 ± 1.0', '0.500')
    """
    if figure["mean"] is None:
        return "–"
    form = f".{digits}f" if abs(figure["mean"]) * scale < 1e5 else ".2e"
    text = f"{figure['mean'] * scale:{form}}"
    return f"{text} ± {figure['std'] * scale:{form}}" if figure["std"] is not None else text


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
