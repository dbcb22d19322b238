"""A client's own limits, which hold whatever the server asks and whatever role it gives the client.

They are set in ``--node-config``: ``opt-out=true``, ``max-epsilon=0.5`` (a wider ε becomes this one, and a rule without
ε gets this one), ``max-loss=2.0`` (decline models with a higher loss), ``rounds-a-day=20``, ``apps="SHA-256 …"`` (the
only apps that may run), ``keep-model="FILE"``, ``report-personal=true`` (tell the accuracies of personal models) and
``log="FILE"``. ``fedalign flower node`` enforces them before any code of an app runs (``guard.py``); FedALIGN's own app
asks them as well.
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.flower.node_log import NodeLog
from fedalign.rules.rule import Broadcast, Measure, Rule
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of

_DAY = 86_400
_ALIKE = 0.7  # of difflib: a key this close to one of the policy's is taken for a misspelt one
_LIMITS = ("opt-out", "max-epsilon", "max-loss", "rounds-a-day", "apps")
#: A key of the owner's with one of these words may be meant as a limit, and must not be without effect.
_WORDS = {
    "app",
    "apps",
    "opt",
    "optin",
    "optout",
    "epsilon",
    "eps",
    "loss",
    "rounds",
    "train",
    "limit",
    "limits",
    "max",
}


@dataclass(frozen=True)
class Policy:
    """A client's limits, and where it keeps its log and the final model.

    >>> Policy.read({"max-loss": 2, "partition-id": 1}).max_loss
    2.0
    >>> Policy.read({"max-los": 2})
    Traceback (most recent call last):
    fedalign.errors.FedalignError: unknown key 'max-los'; did you mean 'max-loss'? Keys of your own may begin with data-
    """

    opt_out: bool = False
    max_epsilon: float | None = None
    max_loss: float | None = None
    rounds_a_day: int | None = None
    apps: str = ""
    cache_mb: int = 2048  #: how large the cache of models on disk may grow; 0: keep none
    keep_model: Path | None = None
    report_personal: bool = False  #: tell the server the test accuracies of personal models
    log: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_epsilon", "max_loss", "rounds_a_day", "cache_mb"):
            value = getattr(self, name)
            if value is not None and not value >= 0:  # NaN is not
                raise FedalignError(f"the node's {name.replace('_', '-')} must be a number, 0 or more, not {value!r}")
        if self.rounds_a_day is not None and self.log is None:
            raise FedalignError('rounds-a-day needs a log, which counts them: add log="FILE" to the node\'s config')
        for word in self.apps.replace(",", " ").split():
            if not re.fullmatch("[0-9a-f]{64}", word):
                raise FedalignError(
                    f"the node's apps must be SHA-256 hashes, as fedalign flower hash prints them, not {word!r}"
                )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Policy:
        """Read a node's settings; other keys are for the data function.

        A key that looks like one of the policy's, or like a limit, raises a :class:`FedalignError`, unless it begins
        with ``data-``.
        """
        known = {name.replace("_", "-"): option for name, option in options_of(cls).items()}
        given: dict[str, Any] = {}
        for key, value in config.items():
            if key in known:
                given[key.replace("-", "_")] = check_type(f"the node's {key}", value, known[key].annotation)
            elif key.startswith("data-"):
                continue
            elif (meant := _resembled(key, known)) is not None:
                raise FedalignError(
                    f"unknown key {key!r}; did you mean {meant!r}? Keys of your own may begin with data-"
                )
            elif _words(key) & _WORDS:
                raise FedalignError(
                    f"unknown key {key!r}, which looks like a limit; the limits are {', '.join(_LIMITS)}. "
                    "Keys of your own may begin with data-"
                )
        if "apps" in given and not given["apps"].replace(",", " ").split():  # such as a variable that is not set
            raise FedalignError("the node's apps name no app; leave them out to let any app run, or set opt-out=true")
        for name in ("log", "keep_model"):
            if given.get(name) is not None:
                given[name] = given[name].expanduser() if given[name] != Path() else None
        return cls(**given)

    @property
    def limits(self) -> tuple[str, ...]:
        """The limits that are in force, as they are written in the config; of the apps, how many there are.

        >>> Policy(opt_out=True, max_loss=2.0, apps="a" * 64).limits
        ('opt-out=true', 'max-loss=2', 'apps (1)')
        """
        numbers = {"max-epsilon": self.max_epsilon, "max-loss": self.max_loss, "rounds-a-day": self.rounds_a_day}
        return (
            *(["opt-out=true"] if self.opt_out else []),
            *(f"{name}={value:g}" for name, value in numbers.items() if value is not None),
            *([f"apps ({len(self.allowed_apps)})"] if self.allowed_apps else []),
        )

    @property
    def allowed_apps(self) -> frozenset[str]:
        """The SHA-256 hashes of the apps that may run; empty if any may."""
        return frozenset(self.apps.replace(",", " ").split())

    @property
    def limits_an_app(self) -> bool:
        """Whether there is a limit that only FedALIGN's own app keeps: an app of another kind may not run then."""
        return any(getattr(self, name) is not None for name in ("max_epsilon", "max_loss", "rounds_a_day"))

    @property
    def wants_personal(self) -> bool:
        """Whether personal models are of use to the owner: it keeps them, or lets their accuracies be reported."""
        return self.keep_model is not None or self.report_personal

    @property
    def node_log(self) -> NodeLog:
        """The log of this node."""
        return NodeLog(self.log)

    def declines(self, app: str | None = None) -> str | None:
        """Return why nothing is done for an app, given the SHA-256 of its bundle; None if its messages are read.

        An app does not know its own hash. It runs only if nobody asks for it, or if somebody checked it before.
        """
        if self.opt_out:
            return "opted out"
        if self.allowed_apps and app is None:
            return "a node with apps must be started with fedalign flower node, which checks them"
        if self.allowed_apps and app not in self.allowed_apps:
            return f"this node does not allow the app {app}"
        return None

    def declines_round(self, round: int, priority: bool, run: int = 0, models: int = 1) -> str | None:
        """Return why this client takes no part in a round, as far as that needs no measure; None if it may.

        ``models`` says how many it is asked to train.
        """
        if self.opt_out:
            return "opted out"
        if self.rounds_a_day is not None and self._rounds_with(run, round, priority, models) > self.rounds_a_day:
            return f"{self.rounds_a_day} rounds a day are enough"
        return None

    def refuses(
        self, rule: Rule, own: Measure, broadcast: Broadcast, priority: bool, run: int = 0, models: int = 1
    ) -> str | None:
        """Return why this client takes no part in a round, given its measure of a model; None if it takes part.

        The limits hold for priority clients too: the server decides who is one. Only the rule does not ask them.
        """
        if (reason := self.declines_round(broadcast.round, priority, run, models)) is not None:
            return reason
        if self.max_loss is not None and not own.loss <= self.max_loss:
            return f"loss {own.loss:.4g} is above its limit {self.max_loss:g}"
        if self.max_epsilon is not None and broadcast.epsilon is not None and broadcast.epsilon > self.max_epsilon:
            broadcast = replace(broadcast, epsilon=self.max_epsilon)
        if not priority and not rule.offers(own, broadcast):
            return rule.why(own, broadcast, False)
        return self._too_far(own, broadcast)

    def note(self, own: Measure, broadcast: Broadcast, refusal: str | None, run: int = 0) -> None:
        """Add a line to the log: the model's loss on this client, the broadcast, and whether the client trained."""
        self.node_log.add(
            run=run,
            asked="train",
            round=broadcast.round,
            loss=own.loss,
            accuracy=own.accuracy,
            global_loss=broadcast.loss,
            trained=refusal is None,
            reason=refusal or "",
        )

    def _too_far(self, own: Measure, broadcast: Broadcast) -> str | None:
        """Compare with the priority clients' loss by this client's own ε; a rule need not have one."""
        if self.max_epsilon is None:
            return None
        if not math.isfinite(broadcast.loss) or not own.loss <= broadcast.loss + self.max_epsilon:
            return f"loss {own.loss:.4g}, not within {self.max_epsilon:.4g} of {broadcast.loss:.4g}"
        return None

    def _rounds_with(self, run: int, round: int, priority: bool, models: int) -> int:
        """Count the rounds of the last 24 hours in which the client trained, including the one it is asked for.

        A priority client may train two models in a round of AutoALIGN, the training model and the priority-only model.
        A third one counts as another round.
        """
        since, trained = time.time() - _DAY, Counter({(str(run), round): models})
        for line in self.node_log.lines(since):
            if line.get("trained") and line["time"] > since:
                trained[line["run"], int(line.get("round", 0))] += 1
        return sum(math.ceil(number / (2 if priority else 1)) for number in trained.values())


def _resembled(key: str, known: Iterable[str]) -> str | None:
    """Return the key of the policy that another one resembles, whatever its capitals, hyphens and underscores.

    A table of a TOML file gives dotted keys. Each part of such a key is compared, too.

    >>> _resembled("Opt_Out", ["opt-out", "log"]), _resembled("partition-id", ["opt-out", "log"])
    ('opt-out', None)
    >>> _resembled("policy.opt-out", ["opt-out", "log"])
    'opt-out'
    """
    plain = {re.sub("[^a-z0-9]", "", name.lower()): name for name in known}
    for part in (key, *key.split(".")):
        close = difflib.get_close_matches(re.sub("[^a-z0-9]", "", part.lower()), plain, n=1, cutoff=_ALIKE)
        if close:
            return plain[close[0]]
    return None


def _words(key: str) -> set[str]:
    """Return the words of a key, in small letters.

    >>> sorted(_words("site.allowedApps")), sorted(_words("LOSS_limit2"))
    (['allowed', 'apps', 'site'], ['limit', 'loss'])
    """
    return {word.lower() for word in re.findall("[A-Z]*[a-z]+|[A-Z]+", key)}
