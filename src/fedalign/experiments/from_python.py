"""What Python gives for an experiment, as the table that a settings file has."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.settings import resolve_adversary
from fedalign.callbacks import Callback
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments.federations import FederationSource
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.valuation import Valuation
from fedalign.metrics.metric import Metric
from fedalign.personal.method import PersonalMethod
from fedalign.registry import (
    AGGREGATORS,
    ATTACKS,
    CALLBACKS,
    CLIENT_STEPS,
    DATA,
    LOCAL_OPTIMIZERS,
    LOSSES,
    METRICS,
    MODELS,
    PARTICIPATION,
    PERSONAL,
    RULES,
    SERVER_OPTIMIZERS,
    SERVER_STEPS,
    TRACKERS,
    VALUATIONS,
)
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Rule
from fedalign.settings.description import as_setting, describe, function_as_schedule, is_setting
from fedalign.settings.live_objects import LIVE, Held
from fedalign.settings.lookup import Registry

_ONE = {
    "loss": LOSSES,
    "local": LOCAL_OPTIMIZERS,
    "participation": PARTICIPATION,
    "server": SERVER_OPTIMIZERS,
    "aggregator": AGGREGATORS,
}
_SEVERAL = {
    "client_steps": CLIENT_STEPS,
    "server_steps": SERVER_STEPS,
    "callbacks": CALLBACKS,
    "track": TRACKERS,
    "trackers": TRACKERS,
}


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A federation, or a function of the seed that makes one, as a source of federations."""

    given: Federation | Callable[[int], Federation]

    def federation(self, seed: int) -> Federation:
        """Return the federation, or make that of a seed."""
        return self.given if isinstance(self.given, Federation) else self.given(seed)


class Tables:
    """Turns objects into tables; ``held`` has those that only a running program can make."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.held: list[Held] = []

    def all(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole table of an experiment; what is None is left to its default."""
        table = {key: self._one(key, value) for key, value in given.items() if value is not None}
        arms = table.pop("arms", None)
        if isinstance(arms, Mapping):
            table["arms"] = [str(name) for name in arms]
            own = {str(name): self._arm(str(name), arm) for name, arm in arms.items()}
            table["arm"] = {**table.get("arm", {}), **{name: arm for name, arm in own.items() if arm is not None}}
        elif arms is not None:
            table["arms"] = list(arms) if isinstance(arms, Sequence) and not isinstance(arms, str) else arms
        return table

    def _one(self, key: str, value: Any) -> Any:
        if key == "data":
            return self._data(value)
        if key == "model":
            return self._model(value)
        if key in _ONE:
            return self._object(_ONE[key], value, lambda: value)
        if key in _SEVERAL:
            return value if isinstance(value, str) else [self._step(_SEVERAL[key], step) for step in value]
        if key == "adversary":
            return self._adversary(value)
        if key == "ledger":
            return self._ledger(value)
        if key == "metrics":
            return self._metrics(value)
        if key == "personal":
            return self._personal(value)
        if key == "arms":
            return value
        plain = value if isinstance(value, Mapping) else as_setting(value)
        if key == "epsilon" and inspect.isroutine(value):
            plain = function_as_schedule(value)
        if not is_setting(plain):
            hint = "; give it to a rule, as in arms={'mine': fa.Align(epsilon=…)}" if key == "epsilon" else ""
            raise FedalignError(f"{key} cannot be {value!r}{hint}")
        return plain

    def _object(self, registry: Registry, given: Any, make: Callable[[], Any]) -> Any:
        """Return a text or a table as it is, and the table of an object."""
        if isinstance(given, str | Mapping):
            return given
        found = describe(registry, given, self.folder)
        return found if found is not None else self._keep(given, make)

    def _keep(self, given: Any, make: Callable[[], Any], key: str = "kind") -> dict[str, Any]:
        held = Held(given, make)
        self.held.append(held)
        return {key: LIVE, **held.table}

    def _data(self, given: Any) -> Any:
        if isinstance(given, FederationSource):
            return self._object(DATA, given, lambda: given)
        if not isinstance(given, str | Mapping | Federation) and not callable(given):
            raise FedalignError(
                f"data must be a Federation, a function of the seed that makes one, or a name, not {given!r:.60}"
            )
        return self._object(DATA, given, lambda: InMemory(given))

    def _model(self, given: Any) -> Any:
        if isinstance(given, nn.Module):
            return self._keep(given, lambda: copy.deepcopy(given))
        if not isinstance(given, str | Mapping) and not callable(given):
            raise FedalignError(f"model must be a module, a function that makes one, or a name, not {given!r:.60}")
        return self._object(MODELS, given, given)

    def _step(self, registry: Registry, given: Any) -> Any:
        """Return the table of an update step, or of a callback, which every run makes anew or has a copy of."""
        if isinstance(given, Callback):
            return self._object(registry, given, lambda: copy.deepcopy(given))
        return self._object(registry, given, given if registry in (CALLBACKS, TRACKERS) else lambda: given)

    def _metrics(self, given: Any) -> Any:
        """Return metrics as settings files have them; functions and objects have tables."""
        if not isinstance(given, Mapping):
            return given
        return {name: one if isinstance(one, str | Mapping) else self._metric(one) for name, one in given.items()}

    def _personal(self, given: Any) -> Any:
        """Return the section of personal methods, which Python may give as objects, alone or in a list."""
        if isinstance(given, str) or (isinstance(given, Mapping) and "methods" not in given):
            return given
        table = dict(given) if isinstance(given, Mapping) else {"methods": given}
        methods = table["methods"]
        if not isinstance(methods, str):
            each = [methods] if isinstance(methods, PersonalMethod) else methods
            table["methods"] = [self._object(PERSONAL, one, partial(copy.copy, one)) for one in each]
        return table

    def _metric(self, given: Any) -> dict[str, Any]:
        metric = given if isinstance(given, Metric) else Metric(given)
        return {**self._object(METRICS, metric.function, lambda: metric.function), "on": metric.on}

    def _adversary(self, given: Any) -> Any:
        if not isinstance(given, Adversary):
            return given
        attacks = [describe(ATTACKS, attack, self.folder) for attack in given.attacks]
        options = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
        own = {name: as_setting(value) for name, value in options.items() if name != "kind" and value is not None}
        if any(attack is None for attack in attacks) or not all(map(is_setting, own.values())):
            raise FedalignError("the adversary's attacks must be built in, or classes that can be imported")
        return resolve_adversary({"kind": attacks, **own}, self.folder)

    def _ledger(self, given: Any) -> Any:
        """Return a ledger, or a method of one, as the section of a settings file."""
        if not isinstance(given, Ledger | Valuation):
            return given
        ledger = given if isinstance(given, Ledger) else Ledger(given)
        method = describe(VALUATIONS, ledger.method, self.folder)
        if method is None:
            method = self._keep(ledger.method, lambda: ledger.method)
        own = {name: as_setting(getattr(ledger, name)) for name in ("copies", "calibrated", "priority")}
        key = {} if ledger.key is None else {"key": str(ledger.key)}
        return {"method": method["kind"], **{k: v for k, v in method.items() if k != "kind"}, **own, **key}

    def _arm(self, name: str, given: Any) -> Any:
        """Return the section of an arm; None for a built-in one without options."""
        if given is None or given == name:
            return None
        if isinstance(given, str):
            return given
        if isinstance(given, Mapping):
            rule = given.get("rule", name)
            own = {key: as_setting(value) for key, value in given.items() if key != "rule"}
            return {**(self._rule(rule) if not isinstance(rule, str) else {"rule": rule}), **own}
        return self._rule(given)

    def _rule(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, Rule | Alone):
            raise FedalignError(f"an arm must be a rule, a name or a table, not {given!r:.60}")
        found = describe(RULES, given, self.folder)
        if found is None:
            return self._keep(given, lambda: copy.deepcopy(given), "rule")
        options = {"match" if key == "on" else key: value for key, value in found.items() if key != "kind"}
        return {"rule": found["kind"], **options}
