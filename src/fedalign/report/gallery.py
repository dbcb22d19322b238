"""Chooses the pictures of a run's report: each is drawn only if the run has something for it to show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedalign.protocol.plan import warmup_rounds
from fedalign.report import autoalign_plots, client_plots, ledger_table, promise_plots, round_plots, theory_plots
from fedalign.report.ledger_plot import contributions
from fedalign.report.measures import accuracy, headline
from fedalign.report.read_runs import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure that has been drawn but not saved, with the stem of its file name and a title in words."""

    name: str
    title: str
    figure: Figure


def gallery(run: RunFolder) -> Iterator[Picture]:
    """Draw the pictures of a run one after another, in the order of the report."""
    yield from _rounds(run)
    for arm in run.histories:
        yield from _selection(run, arm)
    title = f"{run.name}: by how much the served model may be worse than the priority-only model"
    if (figure := promise_plots.promises(run.histories, title)) is not None:
        yield Picture("promise", title, figure)
    yield from _theory(run)
    yield from _incentive(run)
    for arm, (rows, rounds) in ledger_table.rounds_and_totals(run).items():
        yield Picture(f"ledger-{arm}", f"{run.name}: what clients gave ({arm})", contributions(arm, rows, rounds))


def _rounds(run: RunFolder) -> Iterator[Picture]:
    measure, warmup = accuracy(run.histories), _warmup(run)
    if measure is not None:
        arms, title = _with_values(run, measure.key), f"{run.name}: {measure.label} of the priority clients"
        label = f"{measure.words} (%)"
        yield Picture("accuracy", title, round_plots.curves(arms, measure.key, title, label, warmup, percent=True))
        title += ", median and quartiles over seeds"
        spread = round_plots.spreads(arms, measure.key, title, label, warmup, percent=True)
        if spread is not None:
            yield Picture("accuracy-spread", title, spread)
    elif (loss := headline(run.histories)).split != "train" and (arms := _with_values(run, loss.key)):  # a regression
        title = f"{run.name}: {loss.label} of the priority clients"
        yield Picture(f"{loss.split}-loss", title, round_plots.curves(arms, loss.key, title, loss.words, warmup))
    if losses := _with_values(run, "train_loss"):
        title = f"{run.name}: training loss of the priority clients"
        yield Picture("loss", title, round_plots.curves(losses, "train_loss", title, "training loss", warmup))
    if measure is not None:
        title = f"{run.name}: {measure.label} against cost"
        yield Picture("cost", title, round_plots.costs(run.histories, measure, title))


def _selection(run: RunFolder, arm: str) -> Iterator[Picture]:
    histories = run.histories[arm]
    title = f"{run.name}: ε chosen by the evaluators ({arm})"
    if (figure := autoalign_plots.chosen_epsilon(histories, title)) is not None:
        yield Picture(f"epsilon-{arm}", title, figure)
    title = f"{run.name}: held-out loss of the candidates ({arm})"
    if (figure := autoalign_plots.candidate_losses(histories, title)) is not None:
        yield Picture(f"candidates-{arm}", title, figure)
    if client_plots.selects(histories):
        title = f"{run.name}: free clients admitted by {arm}"
        yield Picture(f"admitted-{arm}", title, client_plots.admitted(histories, title))


def _theory(run: RunFolder) -> Iterator[Picture]:
    warmup = _warmup(run)
    if any(r.theta < 1 for runs in run.histories.values() for h in runs.values() for r in h.rounds):
        shared = {arm: runs for arm, runs in run.histories.items() if not run.summary["arms"][arm]["alone"]}
        title = f"{run.name}: θ, the priority clients' share of the aggregate, mean so far"
        yield Picture("theta", title, round_plots.curves(shared, "theta", title, "θ", warmup))
    biased = {
        arm: runs
        for arm, runs in run.histories.items()
        if all(h.rounds and h[-1].rho is not None for h in runs.values())
    }
    if any(h[-1].rho for runs in biased.values() for h in runs.values()):
        title = f"{run.name}: ρ, the bias term of the bound, so far"
        yield Picture("rho", title, round_plots.curves(biased, "rho", title, "ρ", warmup))
    title = f"{run.name}: error and bound"
    if (figure := theory_plots.error_and_bound(run.summary.get("theory", {}), title)) is not None:
        yield Picture("theory", title, figure)


def _incentive(run: RunFolder) -> Iterator[Picture]:
    alone = next((arm for arm, figures in run.summary["arms"].items() if figures["alone"]), None)
    if alone is None or not run.summary.get("incentive"):
        return
    title = f"{run.name}: accuracy of free clients, shared model against local model"
    if (figure := client_plots.incentive(run.clients, alone, title)) is not None:
        yield Picture("incentive", title, figure)
    groups = [group for arm in run.summary.get("personal", {}).values() for group in arm.values()]
    for model in dict.fromkeys(model for group in groups for model in group):
        for group in ("free", "priority"):
            if (model, group) == ("shared", "free"):
                continue  # drawn above
            title = f"{run.name}: accuracy of {group} clients, {model} model against local model"
            drawn = client_plots.incentive(run.clients, alone, title, model, priority=group == "priority")
            if drawn is not None:
                yield Picture(f"incentive-{model}-{group}", title, drawn)


def _with_values(run: RunFolder, name: str) -> round_plots.Arms:
    """Keep the arms that have this number in at least one round."""
    return {
        arm: runs
        for arm, runs in run.histories.items()
        if any(getattr(r, name, None) is not None for h in runs.values() for r in h.rounds)
    }


def _warmup(run: RunFolder) -> int:
    return warmup_rounds(run.settings["warmup"], run.settings["rounds"])
