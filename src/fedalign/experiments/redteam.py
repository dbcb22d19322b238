"""A red team: every rule against every attack at every fraction of hostile clients, on one experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.catalogue import CATALOGUE, NO_ATTACK, named_attacks
from fedalign.attacks.hostile import HostileClients, hostile_clients
from fedalign.attacks.settings import make_adversary
from fedalign.errors import FedalignError
from fedalign.experiments.arms import ARMS, resolve_rule
from fedalign.experiments.config import Experiment, load
from fedalign.registry import AGGREGATORS
from fedalign.rules.baselines import Alone
from fedalign.settings.validation import options_of
from fedalign.simulation.spec import RunSpec

BASELINE = "priority"
RULES = ("fedalign-verified", "auto", "fedalign", "all", "gradient", "trust")
FRACTIONS = (0.25, 0.5, 0.75)
WINDOW = 10  #: the rounds that a final figure is the mean of
_TOLD = ("f", "trim")  # options of aggregators for the number of hostile clients


@dataclass(frozen=True, order=True)
class Case:
    """One run of a red team. Without an attack, ``attack`` is ``"none"`` and ``fraction`` is 0."""

    attack: str
    fraction: float
    seed: int
    rule: str


@dataclass(frozen=True)
class Contender:
    """A rule under test: the arm that has it, and the settings of its aggregator, None for the experiment's.

    ``told`` is the aggregator's option that is set to the true number of hostile clients, if it has one.
    """

    arm: str
    aggregator: dict[str, Any] | None = None
    told: str | None = None


@dataclass
class RedTeam:
    """The runs of a red team, checked and described; :func:`plan_redteam` makes one."""

    experiment: Experiment
    rules: dict[str, Contender]
    attacks: dict[str, dict[str, Any]]
    fractions: tuple[float, ...]
    specs: dict[tuple[str, int], RunSpec]  #: the runs without an attack, by arm and seed
    _adversaries: dict[tuple[str, float], Adversary] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """List all runs. Those with the same hostile clients follow one another, because they share the data.

        The baseline runs without an attack; where an attack has a trigger, once more, to measure by how many samples
        a model without a backdoor is taken in.
        """
        seeds = self.experiment.seeds
        everyone = [BASELINE, *(rule for rule in self.rules if rule != BASELINE)]
        found = [Case(NO_ATTACK, 0.0, seed, rule) for seed in seeds for rule in everyone]
        for attack in self.attacks:
            for fraction in self.fractions:
                rules = everyone[1:]
                if self.has_trigger(attack) and fraction == self.fractions[0]:
                    rules = everyone
                found += [Case(attack, fraction, seed, rule) for seed in seeds for rule in rules]
        return found

    def has_trigger(self, attack: str) -> bool:
        """Say whether an attack plants a backdoor, whose success is measured."""
        return any(one.has_trigger for one in self._adversary(attack, self.fractions[0]).attacks)

    def check_attacks(self) -> None:
        """Raise :class:`FedalignError` for an attack that the first run with it would refuse."""
        spec = next(iter(self.specs.values()))
        for attack in self.attacks:
            adversary = self._adversary(attack, self.fractions[0])
            _ = HostileClients(adversary, spec.federation, spec.seed, spec.rounds).stamped

    def window(self, attack: str) -> int:
        """Return how many last rounds an attack is judged by: 10, or fewer if it strikes only in the last rounds."""
        last: int = self.attacks.get(attack, {}).get("last") or WINDOW
        return min(WINDOW, last)

    def spec(self, case: Case) -> RunSpec:
        """Describe a run. An aggregator that takes the number of hostile clients is told the true one."""
        contender = self.rules.get(case.rule) or Contender(BASELINE)
        spec = self.specs[contender.arm, case.seed]
        adversary = None if case.attack == NO_ATTACK else self._adversary(case.attack, case.fraction)
        spec = dataclasses.replace(spec, adversary=adversary, name=case.rule)
        if contender.aggregator is None:
            return spec
        table = contender.aggregator
        if contender.told is not None:
            hostile = 0 if adversary is None else len(hostile_clients(adversary, spec.federation.roster, case.seed))
            table = {**table, contender.told: hostile}
        return dataclasses.replace(spec, aggregator=AGGREGATORS.make(table, self.experiment.folder))

    def settings(self) -> dict[str, Any]:
        """Return what ``config.toml`` holds: the experiment's settings, and what the rules and attacks are."""
        left_out = ("arms", "arm", "seeds")
        settings = {key: value for key, value in self.experiment.settings.items() if key not in left_out}
        arms = self.experiment.settings.get("arm", {})
        rules = {
            rule: {**arms.get(one.arm, {"rule": one.arm}), **({"aggregator": one.aggregator} if one.aggregator else {})}
            for rule, one in self.rules.items()
        }
        return {**settings, "redteam": {"rules": rules, "attacks": self.attacks}}

    def _adversary(self, attack: str, fraction: float) -> Adversary:
        key = (attack, fraction)
        if key not in self._adversaries:  # one object, so that runs share its poisoned data
            table = {**self.attacks[attack], "fraction": fraction}
            self._adversaries[key] = make_adversary(table, self.experiment.folder)
        return self._adversaries[key]


def plan_redteam(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    rules: Sequence[str] = RULES,
    attacks: Sequence[str] = tuple(CATALOGUE),
    fractions: Sequence[float] = FRACTIONS,
) -> RedTeam:
    """Check an experiment, rules, attacks and fractions, and describe the runs.

    A rule is an arm of the experiment, a rule's text as in ``[arm.NAME]``, or either with an aggregator:
    ``"all+median"``. Personal models, the ledger and metrics of the experiment are left out. Raises
    :class:`FedalignError` for anything that is wrong, such as an attack that does not fit the data.

    >>> team = plan_redteam("trust-synth", {"seeds": 1}, ["all", "all+trimmed-mean"], ["zero"], [0.25, 0.5])
    >>> [(case.rule, case.attack, case.fraction) for case in team.cases()][-2:]
    [('all', 'zero', 0.5), ('all+trimmed-mean', 'zero', 0.5)]
    """
    first = load(name, overrides)
    if first.adversary is not None:
        raise FedalignError(f"{name} has a section [adversary]; a red team brings its own attacks, so leave it out")
    for key in ("callbacks", "trackers"):
        if first.settings.get(key):
            raise FedalignError(f"{name} sets {key}, which a red team does not have; leave it out")
    contenders, further = _contenders(rules, first)
    arms = list(dict.fromkeys([BASELINE, *(one.arm for one in contenders.values())]))
    experiment = load(name, {**(overrides or {}), **further, "arms": arms})
    tables, parts = named_attacks(attacks, experiment.folder), _checked_fractions(fractions)
    if not tables:
        raise FedalignError("--attacks names no attack; leave it out for all of the catalogue")
    specs = {(arm, seed): spec for arm, seed, spec in experiment.specs()}
    for (arm, _), spec in specs.items():
        if isinstance(spec.rule, Alone):
            raise FedalignError(f"the arm {arm!r} has no shared model, so it cannot be attacked; leave it out")
        if not spec.federation.pool.has_classes or not spec.federation.has_test:
            raise FedalignError("a red team compares test accuracies; this experiment has no classes or no test data")
    plain = {key: dataclasses.replace(spec, personal={}, ledger=None, metrics={}) for key, spec in specs.items()}
    team = RedTeam(experiment, contenders, tables, parts, plain)
    team.check_attacks()
    return team


def split_names(text: str, mark: str = ",") -> list[str]:
    """Split a text at a mark that is not inside brackets; empty parts are left out.

    >>> split_names("alie(factor=2, against='median'), zero")
    ["alie(factor=2, against='median')", 'zero']
    """
    return list(_parts(text, mark))


def _parts(text: str, mark: str) -> Iterator[str]:
    depth, start = 0, 0
    for place, letter in enumerate(text + mark):
        depth += (letter in "([") - (letter in ")]")
        if letter == mark and (depth <= 0 or place == len(text)):
            if text[start:place].strip():
                yield text[start:place].strip()
            start = place + 1


def _contenders(rules: Sequence[str], experiment: Experiment) -> tuple[dict[str, Contender], dict[str, Any]]:
    """Read the rules; also return the arms to add to the experiment for rules that are not arms yet."""
    found: dict[str, Contender] = {}
    further: dict[str, Any] = {}
    known = {*ARMS, *experiment.settings.get("arm", {})}
    for text in rules:
        if text in found:
            raise FedalignError(f"the rule {text!r} is named twice")
        rule, *aggregators = split_names(text, "+")
        if len(aggregators) > 1:
            raise FedalignError(f"the rule {text!r} has {len(aggregators)} aggregators; give at most one")
        arm = rule
        if rule not in known:
            resolve_rule("rule", rule, experiment.folder)
            arm = f"redteam-{len(further)}"
            further[f"arm.{arm}"] = rule
        table = told = None
        if aggregators:
            table = AGGREGATORS.resolve("aggregator", aggregators[0], experiment.folder)
            given = AGGREGATORS.split("aggregator", aggregators[0])[2]
            options = options_of(AGGREGATORS.find(table["kind"], experiment.folder))
            told = next((key for key in _TOLD if key in options and key not in given), None)
        found[text] = Contender(arm, table, told)
    if not found.keys() - {BASELINE}:
        raise FedalignError(f"--rules names no rule to compare with {BASELINE}")
    return found, further


def _checked_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    if not fractions or len(set(fractions)) < len(fractions) or not all(0 < part <= 1 for part in fractions):
        raise FedalignError(
            f"--fractions takes parts of the free clients, above 0 and at most 1, not {list(fractions)}"
        )
    return tuple(sorted(fractions))


def checked_folder(folder: Path, resume: bool) -> None:
    """Refuse an output folder that cannot be used: one that is taken, or one that holds nothing to resume."""
    held = (folder / "config.toml").exists()
    if resume and not held:
        raise FedalignError(f"{folder} holds no red team to resume (there is no config.toml in it)")
    if not resume and held:
        raise FedalignError(f"{folder} already holds output; continue it with --resume, or choose another --out")
    if folder.exists() and not folder.is_dir():
        raise FedalignError(f"{folder} is a file; --out must name a folder")
