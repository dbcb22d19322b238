"""What a contribution ledger costs beside AutoALIGN, and how near its sampled values are to exact ones.

    python benchmarks/ledger.py                                   # synth-medium, and the same data with a network
    python benchmarks/ledger.py --experiment local-fmnist --rounds 5
    python benchmarks/ledger.py --accuracy                        # sampled values beside exact ones

A round with a ledger should take at most twice as long as one without. Runs alternate, the first one warms up, and the
fastest of several counts. With ``--accuracy``, eight free clients from harmless to harmful are valued with all
coalitions and with sampled orders, in the rounds of ten runs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import fedalign as fa
from fedalign.experiments.config import load
from fedalign.ledger.settings import as_ledger
from fedalign.simulation.simulation import Simulation

METHODS: dict[str, Any] = {
    "none": None,
    "gtg-shapley": "gtg-shapley",
    "gtg-shapley, free clients alone": {"method": "gtg-shapley", "priority": False},
    "gtg-shapley(permutations=8)": "gtg-shapley(permutations=8)",
    "leave-one-out": "leave-one-out",
}


def seconds_and_models(experiment: Any, method: Any, rounds: int) -> tuple[float, float, float]:
    """Return CPU seconds a round, the models that AutoALIGN and that the ledger had measured a round."""
    (_, _, spec), *_ = experiment.specs()
    simulation = Simulation([replace(spec, ledger=as_ledger(method))], experiment.model, device="cpu")
    began = time.process_time()
    (result,) = simulation.run()
    seconds = (time.process_time() - began) / rounds
    records = result.history.rounds
    # The received model, the candidates, the priority-only model, and the served one at the end of the round.
    own = sum(len(r.tried) + 2 + (r.fallback is not None) for r in records) / rounds
    return seconds, own, sum(r.ledger.models for r in records if r.ledger is not None) / rounds


def values(orders: int | None, seed: int) -> list[Any]:
    """Return what was given in every round of a run of ``all``; None orders: the exact values."""
    method = "exact" if orders is None else f"gtg-shapley(permutations={orders})"
    experiment = fa.Experiment(
        name="accuracy", rounds=4, seeds=[seed], arms=["all"], warmup=0, local={"lr": 0.1, "epochs": 2},
        data={"kind": "synth", "priority": 2, "free": 8, "samples": 80, "test_samples": 20, "heldout_fraction": 0.3},
        model={"kind": "logistic", "inputs": 60, "classes": 10},
    )  # fmt: skip
    (_, _, spec), *_ = experiment.specs()
    ledger = as_ledger({"method": method, "priority": False})
    (result,) = Simulation([replace(spec, ledger=ledger)], experiment.model, device="cpu").run()
    roster = spec.federation.roster
    return [[one for one in r.ledger.clients if not roster.priority[one.id]] for r in result.history.rounds if r.ledger]


def accuracy(seeds: int) -> None:
    """Print how many intervals miss the exact value, the mean error, and how often all ranks over a run are right."""
    print("| orders | intervals that miss | mean error, of the mean size of a value | runs with all ranks right |")
    print("|---|---|---|---|")
    exact = [values(None, seed) for seed in range(seeds)]
    right = [{one.id: one.gave for one in own} for run in exact for own in run]
    size = fmean(abs(value) for own in right for value in own.values())
    for orders in (4, 8, 16):
        runs = [values(orders, seed) for seed in range(seeds)]
        found = [(one, true[one.id]) for own, true in zip(chain(*runs), right, strict=True) for one in own]
        missed = sum(not one.low <= true <= one.high for one, true in found)
        error = fmean(abs(one.gave - true) for one, true in found) / size
        ranks = sum(_ranked(run) == _ranked(true) for run, true in zip(runs, exact, strict=True))
        print(f"| {orders} | {missed} of {len(found)} | {100 * error:.1f} % | {ranks} of {seeds} |")


def _ranked(run: list[Any]) -> list[int]:
    totals: dict[int, float] = {}
    for one in chain(*run):
        totals[one.id] = totals.get(one.id, 0.0) + one.gave
    return sorted(totals, key=totals.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--accuracy", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", fa.FederationWarning)
    if options.accuracy:
        accuracy(seeds=10)
        return
    common: dict[str, Any] = {"rounds": options.rounds, "seeds": 1, "arms": ["auto"], "warmup": 1}
    from fedalign.cli.options import setting

    common |= dict(map(setting, options.set))
    network = {"model": {"kind": "mlp", "inputs": 60, "classes": 10, "hidden": [200, 100]}}
    cases: dict[str, tuple[str, dict[str, Any]]] = (
        {options.experiment: (options.experiment, common)}
        if options.experiment
        else {"synth-medium": ("synth-medium", common), "synth-medium, network": ("synth-medium", common | network)}
    )
    print("| experiment | ledger | CPU s a round | times `auto` | models, `auto` | models, ledger |")
    print("|---|---|---|---|---|---|")
    for title, (name, overrides) in cases.items():
        experiment = load(name, overrides)
        best: dict[str, tuple[float, float, float]] = {}
        for _ in range(options.repeats):
            for method, settings in METHODS.items():
                found = seconds_and_models(experiment, settings, options.rounds)
                best[method] = min(best.get(method, found), found)
        for method, (seconds, own, models) in best.items():
            times = seconds / best["none"][0]
            print(f"| {title} | {method} | {seconds:.3f} | {times:.2f} | {own:.1f} | {models:.1f} |")


if __name__ == "__main__":
    main()
