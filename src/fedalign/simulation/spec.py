"""The description of one run, checked before any work, and the plan that its algorithm follows."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedalign.aggregation.aggregator import Aggregator, WeightedMean
from fedalign.aggregation.update_steps import ClientStep, ServerStep
from fedalign.attacks.adversary import Adversary
from fedalign.callbacks import Callback, RunInfo, Stopped
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.ledger.ledger import Ledger
from fedalign.metrics.metric import Metric
from fedalign.personal.method import PersonalMethod
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.protocol.records import RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.auto import AutoAlign
from fedalign.rules.baselines import Alone, PriorityOnly
from fedalign.rules.rule import Rule, Split
from fedalign.rules.verified import Verified
from fedalign.training.local import LocalSGD
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Full, Participation
from fedalign.training.randomness import Purpose, hashed
from fedalign.training.server import ServerOptimizer

ModelFactory = Callable[[], nn.Module]


@dataclass(frozen=True)
class RunSpec:
    """One run of several that are simulated together."""

    federation: Federation
    rule: Rule | Alone
    rounds: int = 200
    warmup: float = 0.1
    local: LocalOptimizer = LocalSGD(lr=0.1, epochs=5)
    participation: Participation = Full()
    seed: int = 0
    server: ServerOptimizer | None = None  #: None: the server takes the aggregate as it is, as FedAvg does
    aggregator: Aggregator = field(default_factory=WeightedMean)
    client_steps: Sequence[ClientStep] = ()  #: what clients do with their updates before they send them
    server_steps: Sequence[ServerStep] = ()  #: which updates of free clients the server refuses
    adversary: Adversary | None = None  #: hostile free clients
    callbacks: Sequence[Callback] = ()
    name: str = ""  #: what callbacks are told the run is called, such as the arm of an experiment
    folder: Path | None = None  #: where callbacks may write files of this run
    snapshot: Snapshot | None = None  #: where to go on from
    last: RoundRecord | None = None  #: the record of the round before
    past: Sequence[RoundRecord] = ()  #: the records of all rounds before, for callbacks that count
    stopped: Stopped | None = None  #: the run has stopped early: it does no further round
    metrics: Mapping[str, Metric] = field(default_factory=dict)  #: measured after every round
    experiment: str = ""  #: the name that callbacks are told
    home: Path | None = None  #: the output folder of the experiment
    settings: Mapping[str, Any] = field(default_factory=dict)  #: of the experiment, for callbacks
    free_cap: float = math.inf  #: the largest weight of one free client; all priority clients together weigh 1
    free_total: float = math.inf  #: the largest weight of all admitted free clients together
    #: Test figures are measured in every so many rounds, and in the last ten; above 1, there is no training loss.
    measure_every: int = 1
    personal: Mapping[str, PersonalMethod] = field(default_factory=dict)  #: what clients make of the final model
    keep_personal: bool = False  #: the result has the personal models, not only their measures
    ledger: Ledger | None = None  #: how clients are valued in every round; None: not at all

    @property
    def start(self) -> int:
        """The first round to run."""
        return self.snapshot.round if self.snapshot is not None else 0

    @property
    def roster(self) -> Roster:
        """The federation's clients with the caps of this run."""
        return replace(self.federation.roster, free_cap=self.free_cap, free_total=self.free_total)

    @property
    def info(self) -> RunInfo:
        """What callbacks are told about this run."""
        return RunInfo(
            self.name,
            self.seed,
            self.rounds,
            self.start,
            self.last,
            self.folder,
            tuple(self.past),
            tuple(self.metrics),
            self.experiment,
            self.home or self.folder,
            self.settings,
        )


def plan_of(spec: RunSpec) -> Plan:
    """Check a run's description and make its plan; a :class:`FedalignError` says what is wrong."""
    _check_types(spec)
    for callback in spec.callbacks:
        callback.check(spec.info)
    fed = spec.federation
    rule = spec.rule if isinstance(spec.rule, Rule) else PriorityOnly()
    rule.check(spec.rounds)
    spec.local.check(spec.rounds)
    spec.participation.check(spec.roster, spec.rounds)
    match_on: Split = rule.match_on or ("heldout" if fed.has_heldout else "train")
    if match_on == "heldout" and not fed.has_heldout:
        raise FedalignError("match_on='heldout' needs held-out data; give heldout or a heldout_fraction above 0")
    check_personal(spec.personal, fed)
    ledger = spec.ledger if isinstance(spec.rule, Rule) else None
    check_scaffold(rule, spec.local, ledger)
    if ledger is not None:
        ledger.check(free=sum(not client.priority for client in fed.clients), priority=sum(fed.roster.priority))
    return Plan(
        rule=rule,
        rounds=spec.rounds,
        warmup=warmup_rounds(spec.warmup, spec.rounds),
        match_on=match_on,
        evaluate_on="heldout" if all(len(client.heldout) for client in fed.clients if client.priority) else "train",
        has_test=fed.has_test,
        measure_training=spec.measure_every == 1,
        free_alone=spec.measure_every == 1,
        server=spec.server,
        work=tuple(spec.local.samples_for(len(client.train)) for client in fed.clients),
        ledger=ledger,
        seed=spec.seed,
    )


def check_scaffold(rule: Rule, local: LocalOptimizer, ledger: Ledger | None = None) -> None:
    """Refuse SCAFFOLD with a rule for which several aggregates, or none, may use a client's update, or a ledger.

    >>> check_scaffold(PriorityOnly(), LocalSGD(lr=0.1, epochs=1, scaffold=True))
    """
    several = isinstance(rule, AutoAlign) and not rule.is_fedalign
    if local.scaffold and ledger is not None:
        raise FedalignError("SCAFFOLD cannot be combined with a ledger, which aggregates updates more than once")
    if local.scaffold and (rule.needs_updates or several):
        name = 'a verified rule (trust="verify")' if isinstance(rule, Verified) else type(rule).__name__
        raise FedalignError(
            f"SCAFFOLD cannot be combined with {name}, which does not fix in advance whose updates are used"
        )


def check_personal(methods: Mapping[str, PersonalMethod], federation: Federation) -> None:
    """Refuse methods that measure on held-out data if some client has none."""
    lacking = [client.name for client in federation.clients if not len(client.heldout)]
    for name, method in methods.items():
        if method.needs_heldout and lacking:
            raise FedalignError(
                f"the personal method {name} needs held-out data of every client, and client {lacking[0]!r} has none; "
                "hold some out, or set patience = 0 where the method has that option"
            )


def _check_types(spec: RunSpec) -> None:
    for name, value, least, most in (("rounds", spec.rounds, 1, 10**9), ("seed", spec.seed, 0, 2**63 - 1)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value <= most:
            raise FedalignError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    kinds: list[tuple[str, Any, Any, str]] = [
        ("federation", spec.federation, Federation, "Federation"),
        ("rule", spec.rule, Rule | Alone, "Rule"),
        ("local", spec.local, LocalOptimizer, "LocalOptimizer"),
        ("participation", spec.participation, Participation, "Participation"),
        ("server", spec.server, ServerOptimizer | None, "ServerOptimizer"),
        ("aggregator", spec.aggregator, Aggregator, "Aggregator"),
        ("adversary", spec.adversary, Adversary | None, "Adversary"),
        ("ledger", spec.ledger, Ledger | None, "Ledger"),
        *(("client_steps", step, ClientStep, "ClientStep") for step in spec.client_steps),
        *(("server_steps", step, ServerStep, "ServerStep") for step in spec.server_steps),
        *(("callbacks", callback, Callback, "Callback") for callback in spec.callbacks),
        *((f"metrics.{name}", metric, Metric, "Metric") for name, metric in spec.metrics.items()),
        *(("personal", method, PersonalMethod, "PersonalMethod") for method in spec.personal.values()),
    ]
    for name, given, kind, wanted in kinds:
        if not isinstance(given, kind):
            raise FedalignError(f"{name} must be a fedalign.{wanted} object, not {given!r}")


def initial_module(model: ModelFactory | nn.Module, seed: int) -> nn.Module:
    """Make the module that a run with this seed starts from."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(hashed(seed, Purpose.INITIAL_WEIGHTS)) >> 1)
        made = model()
    if not isinstance(made, nn.Module):
        raise FedalignError(
            f"model must be a torch.nn.Module or a function that makes one; it gave {type(made).__name__}"
        )
    return made.cpu()
