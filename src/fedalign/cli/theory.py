"""``fedalign theory advise``: what the bound says about ε, and whether that is what AutoALIGN finds."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.cli.options import Parser, overrides_of
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.protocol.records import History


def add(commands: Subcommands) -> None:
    """Add the command to the parser."""
    command = commands.add_parser("theory", help="the theory: suggest an ε schedule for a strongly convex experiment")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser("advise", help="suggest an ε schedule from a short warm-up, and try it")
    action.add_argument("experiment", metavar="NAME|FILE.toml")
    action.add_argument("--rounds", type=int, metavar="N", help="how many communication rounds")
    action.add_argument("--warmup", type=int, metavar="N", help="rounds of the warm-up (default: a tenth)")
    action.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    action.set_defaults(command=_advise, seeds=None, device=None, tf32=None, arms=None)


def _advise(options: argparse.Namespace) -> int:
    import numpy as np

    from fedalign.experiments.config import load
    from fedalign.rules.align import Align
    from fedalign.rules.auto import AutoAlign
    from fedalign.rules.baselines import PriorityOnly
    from fedalign.simulation.api import simulate_many
    from fedalign.simulation.engine.layout import Layout
    from fedalign.simulation.simulation import SimulationResult
    from fedalign.simulation.spec import RunSpec, initial_module
    from fedalign.theory.advise import advise
    from fedalign.theory.callback import TheoryCallback
    from fedalign.theory.setting import check_rate, check_settings, setting_of
    from fedalign.training.schedules import Piecewise, Theory

    console = Console(highlight=False)
    experiment = load(options.experiment, overrides_of(options))
    arm = experiment.arms[0]
    local = experiment.local(arm)
    check_settings(experiment.settings, local)
    federation = experiment.federation(0)
    setting = setting_of(experiment.settings, federation, local)
    theory = TheoryCallback(setting)
    module = initial_module(experiment.model, 0)
    start = setting.weights(Layout(module).flatten(module))
    c = setting.constants(start)
    if isinstance(local.schedule, Theory):
        local = dataclasses.replace(local, lr=theory.rate)
    check_rate(local, c)
    rounds = experiment.rounds
    short = options.warmup if options.warmup is not None else max(1, rounds // 10)
    if not 0 < short <= rounds:
        raise FedalignError(f"--warmup must be 1 to {rounds} rounds, not {short}")

    def spec(rule: Any, rounds: int) -> RunSpec:
        return RunSpec(
            federation, rule, rounds, 0, local, experiment.participation, callbacks=[theory.for_run()]
        )  # fmt: skip

    def run(specs: list[RunSpec]) -> list[SimulationResult]:
        return simulate_many(specs, experiment.model, loss=experiment.loss, device="cpu")

    (warm,) = run([spec(PriorityOnly(), short)])
    w = setting.weights(Layout(warm.model).flatten(warm.model))
    losses = np.array([o.value(w) for o in setting.problem.objectives])
    advice = advise(setting.problem, c, losses, rounds)

    console.print(
        f"[bold]{escape(experiment.name)}[/]: L = {c.L:.4g}, μ = {c.mu:.4g}, γ = {c.gamma:.4g}, E = {c.local_steps}, "
        f"Γ = {c.heterogeneity:.4g}, σ² ≤ {c.sigma2:.4g}, G² ≤ {c.G2:.4g}"
    )
    roster = federation.roster
    free = [(roster.names[k], c.gaps[k]) for k in range(len(roster)) if not roster.priority[k]]
    table = Table(title=f"Free clients after {short} warm-up rounds", title_justify="left")
    for heading in ("client", "|F_k − F|", "Γ_k"):
        table.add_column(heading, justify="right" if heading != "client" else "left")
    for gap, (name, cost) in sorted(zip(advice.gaps.tolist(), free, strict=True)):
        table.add_row(escape(name), f"{gap:.4g}", f"{cost:.4g}")
    console.print(table)
    console.print(
        "A free client makes a round's share of Γ smaller and brings its own Γ_k; it pays at most while Γ_k ≤ 3LηΓ."
    )
    for piece in advice.pieces:
        console.print(
            f"  from round {piece.round} (η = {piece.rate:.3g}: Γ_k up to {piece.worth:.3g} can pay): "
            f"[bold]ε = {piece.epsilon:.4g}[/], {piece.clients} of {len(free)} free clients inside"
        )
    pieces = tuple((piece.round, float(f"{piece.epsilon:.6g}")) for piece in advice.pieces)
    listed = ", ".join(f"[{round}, {epsilon}]" for round, epsilon in pieces)
    console.print(f'In the experiment: epsilon = {{schedule = "piecewise", pieces = [{listed}]}}', markup=False)

    arms = {
        "ε = 0": PriorityOnly(),
        "ε = ∞": Align(float("inf")),
        "advice": Align(Piecewise(pieces)),
        "AutoALIGN": AutoAlign(),
        "without base": AutoAlign(cosine=None),
    }
    results = run([spec(rule, rounds) for rule in arms.values()])
    table = Table(title=f"Tried, {rounds} rounds, one seed", title_justify="left")
    for heading in ("", "bound", "F(w_T) − F*", "θ", "ε: first, second, last third"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, result in zip(arms, results, strict=True):
        if result.error is not None:
            table.add_row(name, "–", str(result.error), "", "")
            continue
        last = result.history.rounds[-1]
        bound = f"{advice.bounds[name]:.3g}" if name in advice.bounds else "–"
        error = (last.objective or 0.0) - c.minimum
        table.add_row(name, bound, f"{error:.3g}", f"{last.theta:.3g}", _thirds(result.history))
    console.print(table)
    console.print(
        "The bound is worst-case and far above the error (docs/theory.md); AutoALIGN decides after training, so no "
        "bound of the paper covers it."
    )
    return 0


def _thirds(history: History) -> str:
    """Give the median ε of the rounds' first, second and last third."""
    chosen = [r.epsilon for r in history.rounds if r.epsilon is not None]
    size = len(chosen) // 3
    if not size:
        return "–"
    parts = (sorted(chosen[i * size : (i + 1) * size]) for i in range(3))
    return ", ".join(f"{part[len(part) // 2]:.3g}" for part in parts)
