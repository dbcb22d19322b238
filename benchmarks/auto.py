"""Variants of AutoALIGN: other candidates and other ways to choose among them, on an experiment.

    python benchmarks/auto.py run EXPERIMENT [--variants "cuts; cosine"] [--seeds N] [--device cuda] [--tf32] …
    python benchmarks/auto.py table     # from docs/results/auto/*.json into docs/research/autoalign.md; runs nothing

`run` prints final test accuracies and keeps them in docs/results/auto/EXPERIMENT.json, variant by variant.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.progress import track
from rules import SUMMARIES, grid, into_page

import fedalign.simulation.simulation
from fedalign.experiments.config import load
from fedalign.paper.compact import read_all
from fedalign.protocol.messages import RoundDone
from fedalign.protocol.roster import Roster
from fedalign.rules.auto import AutoAlign, sizes
from fedalign.rules.rule import Broadcast, Measure, Offer, Selection
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import EvalJob
from fedalign.simulation.simulation import Simulation
from fedalign.training.participation import Uniform

ROOT = Path(__file__).resolve().parent.parent
KEPT, PAGE = ROOT / "docs" / "results" / "auto", ROOT / "docs" / "research" / "autoalign.md"
LADDER = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, math.inf)
SHARPNESS = [2 ** (i / 2) for i in range(-8, 5)]  # what scores are multiplied with to calibrate them


@dataclass(frozen=True)
class Detailed(Measure):
    """A measure with the loss of each sample, and the mean loss at each sharpness of the scores."""

    losses: Any = None
    calibrated: Any = None


class DetailedEngine(BatchedEngine):
    """An engine whose measures are detailed."""

    def evaluate(self, jobs: Sequence[EvalJob]) -> list[Measure]:
        """Measure; the details once more, which is slow but plain."""
        plain = super().evaluate(jobs)
        found: dict[int, Measure] = {}
        with torch.no_grad():
            for group in self._eval_groups(jobs):
                outputs, y, lengths = self._eval_group(jobs, group)
                each = torch.split(self._loss(outputs, y).double().cpu(), lengths.tolist())
                at = torch.stack([self._loss(outputs * by, y).double() for by in SHARPNESS]).cpu()
                curves = [part.mean(1) for part in torch.split(at, lengths.tolist(), dim=1)]
                for j, mine, curve in zip([j for m in group for j in m], each, curves, strict=True):
                    m = plain[j]
                    found[j] = Detailed(m.loss, m.accuracy, m.samples, mine.numpy(), curve.numpy())
        return [found[j] for j in range(len(jobs))]


@dataclass(frozen=True)
class Variant(AutoAlign):
    """AutoALIGN without its fallback and training model, with other candidates and another way to choose."""

    fallback: bool = False
    cosine: float | None = None
    weights: tuple[float, ...] = (1.0,)  # free clients' weights are also tried times these
    finish: float = 0.0  # the last part of the rounds is for priority clients only
    by: str = "loss"  # or accuracy, calibrated
    power: float = 0.0  # > 0: choose by (1 − p^power)/power, which forgives overconfidence less
    sure: float = 0.0  # standard errors of the paired difference that a gain must exceed
    margin: float = 0.0  # part of the loss that a gain must exceed

    def epsilon_at(self, round: int, rounds: int) -> float:
        return 0.0 if round >= rounds * (1 - self.finish) else super().epsilon_at(round, rounds)

    def candidates(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> list[Selection]:
        if broadcast.epsilon == 0:
            return [Selection((), epsilon=0.0)]
        return self.weighed(super().candidates(offers, broadcast))

    def weighed(self, plain: Sequence[Selection]) -> list[Selection]:
        return [
            replace(one, scale=dict.fromkeys(one.clients, by))
            for one in plain
            for by in (self.weights if one.clients else (1.0,))
        ]

    def choose(
        self, candidates: Sequence[Selection], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        total = math.fsum(p.values())
        share = {k: part / total for k, part in p.items()}
        if self.by == "accuracy":
            scores = [sum(share[k] * (1e-3 * m.loss - (m.accuracy or 0)) for k, m in one.items()) for one in measures]
        elif self.by == "calibrated":
            scores = [min(sum(share[k] * m.calibrated for k, m in one.items())) for one in measures]  # type: ignore[attr-defined]
        else:
            return self._best_gain(measures, share)
        losses = [sum(share[k] * m.loss for k, m in one.items()) for one in measures]
        allowed = [i for i in range(len(candidates)) if losses[i] <= losses[0]]
        return min(allowed, key=lambda i: (scores[i], len(candidates[i].clients)))

    def _best_gain(self, measures: Sequence[Mapping[int, Measure]], share: Mapping[int, float]) -> int:
        """Take the candidate that gains most over the first, less so many standard errors; none if that is little."""

        def losses_of(i: int, k: int) -> Any:
            losses = measures[i][k].losses  # type: ignore[attr-defined]
            return (1 - np.exp(-self.power * losses)) / self.power if self.power else losses

        first = {k: losses_of(0, k) for k in share}
        best, most = 0, self.margin * sum(share[k] * first[k].mean() for k in share)
        for i in range(1, len(measures)):
            gains = {k: first[k] - losses_of(i, k) for k in share}
            variance = sum(share[k] ** 2 * g.var(ddof=1) / len(g) for k, g in gains.items() if len(g) > 1)
            gain = sum(share[k] * g.mean() for k, g in gains.items()) - self.sure * math.sqrt(variance)
            if gain > most:
                best, most = i, gain
        return best


@dataclass(frozen=True)
class ByUpdates(Variant):
    """Candidates that admit the clients whose updates are most like the priority clients' mean update."""

    needs_updates: ClassVar[bool] = True
    gaps_too: bool = False

    def candidates(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> list[Selection]:
        order = sorted(offers, key=lambda k: -offers[k].cosine)
        plain = {one.clients: one for one in (AutoAlign().candidates(offers, broadcast) if self.gaps_too else ())}
        plain.setdefault((), Selection((), epsilon=0.0))
        for size in sizes(len(order)):
            clients = tuple(sorted(order[:size]))
            widest = max(self._align.gap(offers[k].measure, broadcast) for k in clients)
            plain.setdefault(clients, Selection(clients, epsilon=widest))
        return self.weighed(sorted(plain.values(), key=lambda one: len(one.clients)))


@dataclass(frozen=True)
class Nobody(AutoAlign):
    """AutoALIGN that always serves the priority clients' own aggregate; free clients enter the training model alone."""

    def choose(
        self, candidates: Sequence[Selection], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        return 0


@dataclass(frozen=True)
class BaseToo(AutoAlign):
    """AutoALIGN whose training model is a candidate as well."""

    def candidates(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> list[Selection]:
        plain = {one.clients: one for one in super().candidates(offers, broadcast)}
        training = self.training_set(offers, broadcast) or {}
        clients = tuple(k for k in offers if k in training)
        if clients:
            widest = max(self._align.gap(offers[k].measure, broadcast) for k in clients)
            plain.setdefault(clients, Selection(clients, epsilon=widest))
        return sorted(plain.values(), key=lambda one: len(one.clients))


@dataclass(frozen=True)
class Smoothed(AutoAlign):
    """AutoALIGN that chooses how many to admit by what that number has gained over nobody in some ten rounds."""

    gains: dict[int, float] = field(default_factory=dict, compare=False)

    def choose(
        self, candidates: Sequence[Selection], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        losses = [math.fsum(p[k] * m.loss for k, m in one.items()) for one in measures]
        sizes = [len(one.clients) for one in candidates]
        for size, loss in zip(sizes, losses, strict=True):
            gain = 1 - loss / losses[0]
            self.gains[size] = self.gains.get(size, gain) + 0.1 * (gain - self.gains.get(size, gain))
        return max(range(len(sizes)), key=lambda i: (self.gains[sizes[i]], -sizes[i]))


@dataclass(frozen=True)
class TrainersEvaluate(Uniform):
    """The clients that train are also those that evaluate."""

    def draw_evaluators(self, round: int, roster: Roster, seed: int) -> None:
        return None


VARIANTS: dict[str, AutoAlign] = {
    "ladder": Variant(LADDER),
    "cuts": Variant(),
    "cosine": ByUpdates(),
    "cuts and cosine": ByUpdates(gaps_too=True),
    "cuts, quarter weights too": Variant(weights=(0.25, 1.0)),
    "cuts, one standard error": Variant(sure=1.0),
    "cuts, three standard errors": Variant(sure=3.0),
    "cuts, margin 5 %": Variant(margin=0.05),
    "cuts, margin 10 %": Variant(margin=0.1),
    "cuts, margin 20 %": Variant(margin=0.2),
    "cuts, power 0.1": Variant(power=0.1),
    "cuts, power 0.5": Variant(power=0.5),
    "cuts, power 1": Variant(power=1.0),
    "cuts, accuracy": Variant(by="accuracy"),
    "cuts, calibrated": Variant(by="calibrated"),
    "cuts, finish": Variant(finish=0.1),
    "ladder, fallback": AutoAlign(LADDER),
    "cuts, fallback": AutoAlign(cosine=None),
    "base of cosine 0": AutoAlign(cosine=0.0, fallback=False),
    "base of cosine 0, fallback": AutoAlign(cosine=0.0),
    "the same, judged by those that train": AutoAlign(cosine=0.0),
    "base of cosine 0, fallback, accuracy": Variant(fallback=True, cosine=0.0, by="accuracy"),
    "base of cosine 0, fallback, nobody admitted": Nobody(cosine=0.0),
    "base of cosine 0.05, fallback": AutoAlign(cosine=0.05),
    "base of cosine -0.1": AutoAlign(fallback=False),
    "base of cosine -0.1, fallback": AutoAlign(),
    "base of cosine -0.1, fallback, smoothed": Smoothed(),
    "base of cosine -0.1 as a candidate too, fallback": BaseToo(),
    "base of everybody, fallback": AutoAlign(cosine=-1.0),
}
#: What `auto` is; its row comes from the summaries of benchmarks/rules.py.
AUTO = "base of cosine -0.1, fallback"


def run(options: argparse.Namespace) -> None:
    names = [n.strip() for n in options.variants.split(";")] if options.variants else list(VARIANTS)
    overrides: dict[str, Any] = {"seeds": options.seeds, "rounds": options.rounds, "arms": ["priority"]}
    if options.folder:
        overrides["data.folder"] = options.folder
    experiment = load(options.experiment, overrides)
    specs = experiment.specs()
    runs = [("priority", seed, spec) for _, seed, spec in specs]
    for name in names:
        for _, seed, spec in specs:
            # A copy, because one may keep something of its run; with the fallback that the page's figures had.
            spec = replace(spec, rule=replace(deepcopy(VARIANTS[name]), credit=True))
            if "those that train" in name and isinstance(spec.participation, Uniform):
                spec = replace(spec, participation=TrainersEvaluate(spec.participation.fraction))
            runs.append((name, seed, spec))
    if any(isinstance(VARIANTS[name], Variant) and VARIANTS[name].by != "accuracy" for name in names):  # type: ignore[attr-defined]
        fedalign.simulation.simulation.BatchedEngine = DetailedEngine  # type: ignore[misc,attr-defined]
    simulation = Simulation([spec for *_, spec in runs], experiment.model, device=options.device, tf32=options.tf32)
    records: list[list[Any]] = [[] for _ in runs]
    for events in track(simulation.rounds(), description=experiment.name, total=options.rounds):
        for place, event in events:
            if isinstance(event, RoundDone):
                records[place].append(event.record)
    path = KEPT / f"{experiment.name}.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    for (name, seed, _), mine in zip(runs, records, strict=True):
        last = mine[-10:]
        kept.setdefault(name, {})[str(seed)] = {
            "test_accuracy": round(float(np.mean([r.test_accuracy for r in last])), 5),
            "heldout_loss": round(float(np.mean([r.global_loss for r in last])), 5),
            "admitted": round(float(np.mean([r.admitted for r in mine[len(mine) // 10 :]])), 3),
        }
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    for name in ("priority", *names):
        print(f"{name:28s} {cell(kept, name)}")


def cell(kept: Mapping[str, Any], name: str) -> str:
    """Give the mean over seeds, and the worst difference to `priority` on a seed."""
    if name not in kept:
        return "–"
    seeds = kept[name].keys() & kept["priority"].keys()
    mean = 100 * np.mean([kept[name][s]["test_accuracy"] for s in seeds])
    worst = 100 * min(kept[name][s]["test_accuracy"] - kept["priority"][s]["test_accuracy"] for s in seeds)
    return f"{mean:.1f}" if name == "priority" else f"{mean:.1f} ({worst:+.1f})"


def table(options: argparse.Namespace) -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))}
    for name, whole in read_all(SUMMARIES).items():
        if name in results:
            finals = zip(whole["seeds"], whole["arms"]["auto"]["test_accuracy"]["per_seed"], strict=True)
            results[name][AUTO] = {str(seed): {"test_accuracy": final} for seed, final in finals}
    rows = [[title(name), *(cell(kept, name) for kept in results.values())] for name in ("priority", *VARIANTS)]
    into_page(PAGE, "auto", grid(["variant", *(f"`{name}`" for name in results)], rows))


def title(variant: str) -> str:
    """Give a variant's name as the page writes it; the summaries keep the names of version 0.1."""
    words = {"base of": "training model of", "judged by those that train": "evaluated by the clients that train"}
    for before, after in words.items():
        variant = variant.replace(before, after)
    return variant.replace("everybody", "all clients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("experiment")
    command.add_argument("--variants", help="names, with ; between them (default: all)")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--rounds", type=int, default=200)
    command.add_argument("--device", default="auto")
    command.add_argument("--folder")
    command.add_argument("--tf32", action="store_true")
    command.set_defaults(do=run)
    commands.add_parser("table").set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
