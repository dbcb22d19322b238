"""Runs a red team in stacks that are simulated together; every finished run's figures are kept in ``results.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedalign.errors import FedalignError
from fedalign.experiments.config_file import check_same, read_settings
from fedalign.experiments.redteam import WINDOW, Case, RedTeam, checked_folder
from fedalign.experiments.store import write_atomically
from fedalign.protocol.records import mean_or_none
from fedalign.simulation.api import simulate_many
from fedalign.simulation.device import resolve_device
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.simulation import SimulationResult
from fedalign.simulation.spec import initial_module

# Most runs of a stack. An interruption loses the stack under way, and a CPU gains little by more.
_MOST_RUNS = {"cuda": 120, "cpu": 30}
_BYTES = 2 << 30  # of updates and poisoned data that a stack may hold


@dataclass(frozen=True)
class Figures:
    """A finished run: test accuracy and backdoor success of its last 10 rounds, or why it diverged."""

    accuracies: tuple[float, ...]
    successes: tuple[float, ...] = ()
    diverged: str | None = None

    def accuracy(self, window: int) -> float:
        """Return the mean test accuracy of the last rounds; a run that diverged serves nobody and has 0."""
        return 0.0 if self.diverged is not None else mean_or_none(self.accuracies[-window:]) or 0.0

    def success(self, window: int) -> float | None:
        """Return the mean success of the backdoor in the last rounds; None where it was not measured."""
        return mean_or_none(self.successes[-window:])


def open_folder(team: RedTeam, folder: Path, resume: bool) -> tuple[dict[Case, Figures], list[str]]:
    """Make the output folder, or read the runs that have finished there; also returns notes for the user.

    A resumed red team may have further rules, attacks, fractions and seeds. Raises :class:`FedalignError` if the
    folder cannot be used, or if its runs had other settings.
    """
    checked_folder(folder, resume)
    settings = {**team.settings(), "device": resolve_device(team.experiment.device).type}
    notes: list[str] = []
    done: dict[Case, Figures] = {}
    if resume:
        before = read_settings(folder)
        earlier = before.get("redteam", {})
        for kind in ("rules", "attacks"):  # those that are not asked for now stay in the file
            settings["redteam"][kind] = {**earlier.get(kind, {}), **settings["redteam"][kind]}
            before.setdefault("redteam", {})[kind] = {**settings["redteam"][kind], **earlier.get(kind, {})}
        notes = check_same(folder, before, settings)
        done = _read(folder / "results.jsonl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.toml", tomli_w.dumps(settings))
        write_atomically(folder / "results.jsonl", "".join(_line(case, one) for case, one in done.items()))
    except OSError as error:
        raise FedalignError(f"cannot write to {folder}: {error.strerror}") from error
    return done, notes


def run_cases(
    team: RedTeam,
    folder: Path,
    done: dict[Case, Figures],
    *,
    most: int | None = None,
    on_stack: Callable[[Sequence[Case]], None] = lambda cases: None,
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Simulate all runs that are not in ``done``, and add them to it and to ``results.jsonl``, stack by stack.

    ``most`` is the size of a stack (see :func:`stacks`). ``on_stack`` gets the runs of a stack before it begins, and
    ``on_round`` is called after every round of every run.
    """
    experiment = team.experiment
    for cases in stacks(team, [case for case in team.cases() if case not in done], most):
        on_stack(cases)
        results = simulate_many(
            [team.spec(case) for case in cases],
            experiment.model,
            device=experiment.device,
            **experiment.engine_options(),
            on_round=lambda index, record: on_round(),
        )
        found = {case: _figures(result) for case, result in zip(cases, results, strict=True)}
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(_line(case, figures) for case, figures in found.items())
        done |= found


def stacks(team: RedTeam, cases: Sequence[Case], most: int | None = None) -> list[list[Case]]:
    """Divide runs into stacks of at most ``most`` runs.

    By default a stack has as many as fit into 2 GiB, at most 30 on a CPU and 120 on a GPU.

    What needs memory: attackers look at all updates of a round, which are held, and have poisoned data of their own,
    which the rules share.
    """
    if not cases:
        return []
    layout = Layout(initial_module(team.experiment.model, 0))
    federation = team.spec(cases[0]).federation
    samples = sum(len(client.train) + len(client.heldout) for client in federation.clients)
    features = federation.pool.x[:1].element_size() * federation.pool.x[0].numel()
    size = len(federation) * layout.size * 2 * layout.dtype.itemsize + samples * features // len(team.rules)
    usual = _MOST_RUNS.get(resolve_device(team.experiment.device).type, 30)
    length = most or max(1, min(usual, _BYTES // size))
    return [list(cases[start : start + length]) for start in range(0, len(cases), length)]


def _figures(result: SimulationResult) -> Figures:
    rounds = result.history.rounds[-WINDOW:]
    return Figures(
        tuple(r.test_accuracy for r in rounds if r.test_accuracy is not None),
        tuple(r.attack_success for r in rounds if r.attack_success is not None),
        None if result.error is None else str(result.error),
    )


def _line(case: Case, figures: Figures) -> str:
    row = {
        "rule": case.rule,
        "attack": case.attack,
        "fraction": case.fraction,
        "seed": case.seed,
        "test_accuracy": mean_or_none(figures.accuracies),
        "attack_success": mean_or_none(figures.successes),
        "diverged": figures.diverged,
        "last_accuracies": list(figures.accuracies),
        "last_successes": list(figures.successes),
    }
    return json.dumps(row, allow_nan=False) + "\n"


def _read(path: Path) -> dict[Case, Figures]:
    """Read the finished runs; a last line that a kill cut off is left out, and its run is done again."""
    found: dict[Case, Figures] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row: Mapping[str, Any] = json.loads(line)
            case = Case(row["attack"], row["fraction"], row["seed"], row["rule"])
            found[case] = Figures(tuple(row["last_accuracies"]), tuple(row["last_successes"]), row["diverged"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise FedalignError(f"{path} is damaged in line {number}: {error}") from error
    return found
