"""``fedalign theory advise``: suggest a schedule of ε from the bound, and compare it with AutoALIGN."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.cli.options import Parser, overrides_of
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.data.federation import Federation
    from fedalign.experiments.config import Experiment
    from fedalign.protocol.records import History
    from fedalign.rules.rule import Rule
    from fedalign.simulation.simulation import SimulationResult
    from fedalign.theory.advise import Advice
    from fedalign.theory.callback import TheoryCallback
    from fedalign.theory.constants import Constants
    from fedalign.theory.minimise import Array
    from fedalign.theory.setting import Setting
    from fedalign.training.optimizer import LocalOptimizer


def add(commands: Subcommands) -> None:
    """Add ``theory`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("theory", help="suggest a schedule of ε for a strongly convex experiment")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser("advise", help="suggest a schedule of ε from a short warm-up, and try it")
    action.add_argument("experiment", metavar="NAME|FILE.toml", help="a strongly convex experiment")
    action.add_argument("--rounds", type=int, metavar="N", help="number of communication rounds")
    action.add_argument(
        "--warmup", type=int, metavar="N", help="number of warm-up rounds (default: a tenth of all rounds)"
    )
    action.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    action.set_defaults(command=_advise, seeds=None, device=None, tf32=None, arms=None)


def _advise(options: argparse.Namespace) -> int:
    from fedalign.experiments.config import load
    from fedalign.theory.advise import advise

    console = Console(highlight=False)
    experiment = load(options.experiment, overrides_of(options))
    trial = _Trial.of(experiment)
    rounds = experiment.rounds
    warmup = options.warmup if options.warmup is not None else max(1, rounds // 10)
    if not 0 < warmup <= rounds:
        raise FedalignError(f"--warmup must be 1 to {rounds} rounds, not {warmup}")
    advice = advise(trial.setting.problem, trial.constants, trial.losses_after(warmup), rounds)
    _print_constants(console, experiment.name, trial.constants)
    _print_gaps(console, trial, advice, warmup)
    pieces = _print_advice(console, advice)
    _print_results(console, trial, advice, pieces)
    return 0


@dataclasses.dataclass(frozen=True)
class _Trial:
    """An experiment under the assumptions of the theorems, ready to run with one seed and any rule."""

    experiment: Experiment
    federation: Federation
    setting: Setting
    constants: Constants
    theory: TheoryCallback
    local: LocalOptimizer

    @classmethod
    def of(cls, experiment: Experiment) -> _Trial:
        from fedalign.simulation.engine.layout import Layout
        from fedalign.simulation.spec import initial_module
        from fedalign.theory.callback import TheoryCallback
        from fedalign.theory.setting import check_rate, check_settings, setting_of
        from fedalign.training.schedules import Theory

        local = experiment.local(experiment.arms[0])
        check_settings(experiment.settings, local)
        federation = experiment.federation(0)
        setting = setting_of(experiment.settings, federation, local)
        theory = TheoryCallback(setting)
        module = initial_module(experiment.model, 0)
        constants = setting.constants(setting.weights(Layout(module).flatten(module)))
        if isinstance(local.schedule, Theory):
            local = dataclasses.replace(local, lr=theory.rate)
        check_rate(local, constants)
        return cls(experiment, federation, setting, constants, theory, local)

    def run(self, rules: Sequence[Rule], rounds: int) -> list[SimulationResult]:
        from fedalign.simulation.api import simulate_many
        from fedalign.simulation.spec import RunSpec

        participation = self.experiment.participation
        specs = [
            RunSpec(self.federation, rule, rounds, 0, self.local, participation, callbacks=[self.theory.for_run()])
            for rule in rules
        ]
        return simulate_many(specs, self.experiment.model, loss=self.experiment.loss, device="cpu")

    def losses_after(self, warmup: int) -> Array:
        """Return F_k(w) of all clients after ``warmup`` rounds of FedAvg on the priority clients."""
        import numpy as np

        from fedalign.rules.baselines import PriorityOnly
        from fedalign.simulation.engine.layout import Layout

        (result,) = self.run([PriorityOnly()], warmup)
        w = self.setting.weights(Layout(result.model).flatten(result.model))
        return np.array([objective.value(w) for objective in self.setting.problem.objectives])


def _print_constants(console: Console, name: str, c: Constants) -> None:
    console.print(
        f"[bold]{escape(name)}[/]: L = {c.L:.4g}, μ = {c.mu:.4g}, γ = {c.gamma:.4g}, E = {c.local_steps}, "
        f"Γ = {c.heterogeneity:.4g}, σ² ≤ {c.sigma2:.4g}, G² ≤ {c.G2:.4g}"
    )


def _print_gaps(console: Console, trial: _Trial, advice: Advice, warmup: int) -> None:
    roster = trial.federation.roster
    free = [(roster.names[k], trial.constants.gaps[k]) for k in range(len(roster)) if not roster.priority[k]]
    table = Table(title=f"Free clients after {warmup} warm-up rounds", title_justify="left")
    for heading in ("client", "|F_k − F|", "Γ_k"):
        table.add_column(heading, justify="right" if heading != "client" else "left")
    for gap, (name, cost) in sorted(zip(advice.gaps.tolist(), free, strict=True)):
        table.add_row(escape(name), f"{gap:.4g}", f"{cost:.4g}")
    console.print(table)


def _print_advice(console: Console, advice: Advice) -> tuple[tuple[int, float], ...]:
    """Print the suggested schedule and how to write it in an experiment; return its pieces, rounded as printed."""
    console.print(
        "Including a free client reduces the share of Γ in a round's bound and adds the client's Γ_k. It can lower the "
        "bound only while Γ_k ≤ 3LηΓ."
    )
    for piece in advice.pieces:
        console.print(
            f"  from round {piece.round} (η = {piece.rate:.3g}; Γ_k up to {piece.worth:.3g} can lower the bound): "
            f"[bold]ε = {piece.epsilon:.4g}[/] admits {piece.clients} of {len(advice.gaps)} free clients"
        )
    pieces = tuple((piece.round, float(f"{piece.epsilon:.6g}")) for piece in advice.pieces)
    listed = ", ".join(f"[{round}, {epsilon}]" for round, epsilon in pieces)
    console.print(
        f'In the experiment: epsilon = {{schedule = "piecewise", pieces = [{listed}]}}', markup=False, soft_wrap=True
    )
    return pieces


def _print_results(console: Console, trial: _Trial, advice: Advice, pieces: tuple[tuple[int, float], ...]) -> None:
    """Run the advice beside FedAvg on the priority clients, FedAvg on all clients and AutoALIGN; print a table."""
    from fedalign.rules.align import Align
    from fedalign.rules.auto import AutoAlign
    from fedalign.rules.baselines import PriorityOnly
    from fedalign.training.schedules import Piecewise

    rounds = trial.experiment.rounds
    arms = {
        "ε = 0": PriorityOnly(),
        "ε = ∞": Align(float("inf")),
        "advice": Align(Piecewise(pieces)),
        "AutoALIGN": AutoAlign(),
        "AutoALIGN, one model": AutoAlign(cosine=None),
    }
    results = trial.run(list(arms.values()), rounds)
    table = Table(title=f"Results after {rounds} rounds, one seed", title_justify="left")
    for heading in ("", "bound", "F(w_T) − F*", "θ", "ε by thirds"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, result in zip(arms, results, strict=True):
        if result.error is not None:
            table.add_row(name, "–", str(result.error), "", "")
            continue
        last = result.history.rounds[-1]
        bound = f"{advice.bounds[name]:.3g}" if name in advice.bounds else "–"
        error = (last.objective or 0.0) - trial.constants.minimum
        table.add_row(name, bound, f"{error:.3g}", f"{last.theta:.3g}", _thirds(result.history))
    console.print(table)
    console.print(
        "ε by thirds: the median ε in the first, second and last third of the rounds. AutoALIGN, one model: the served "
        "model is also the training model. The bound is a worst case, far above the error (docs/theory.md). AutoALIGN "
        "decides after training, so no bound of the paper covers it."
    )


def _thirds(history: History) -> str:
    """Return the median ε in the first, second and last third of the rounds."""
    chosen = [r.epsilon for r in history.rounds if r.epsilon is not None]
    size = len(chosen) // 3
    if not size:
        return "–"
    parts = (sorted(chosen[i * size : (i + 1) * size]) for i in range(3))
    return ", ".join(f"{part[len(part) // 2]:.3g}" for part in parts)
