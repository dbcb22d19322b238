"""A client's own limits, which hold whatever the server asks, and its log of the models that it received.

They are set in ``flower-supernode --node-config``: ``opt-out=true``, ``max-epsilon=0.5`` (a wider ε becomes this one),
``max-loss=2.0`` (decline models with a higher loss), ``rounds-a-day=20`` and ``log="…/fedalign.jsonl"``. Only
``opt-out`` and ``rounds-a-day`` apply to priority clients.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.rules.rule import Broadcast, Measure, Rule
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of

_DAY = 86_400


@dataclass(frozen=True)
class Policy:
    """A client's limits. ``log`` is a file on the client's machine, with a line for every model that it received."""

    opt_out: bool = False
    max_epsilon: float | None = None
    max_loss: float | None = None
    rounds_a_day: int | None = None
    log: Path | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Policy:
        """Read a node's settings; other keys, such as ``partition-id``, are for the data function."""
        given: dict[str, Any] = {}
        for name, option in options_of(cls).items():
            key = name.replace("_", "-")
            if key in config:
                given[name] = check_type(f"the node's {key}", config[key], option.annotation)
        if given.get("log") is not None:
            given["log"] = given["log"].expanduser() if given["log"] != Path() else None
        policy = cls(**given)
        for name in ("max_epsilon", "max_loss", "rounds_a_day"):
            value = getattr(policy, name)
            if value is not None and value < 0:
                raise FedalignError(f"the node's {name.replace('_', '-')} must be a number, 0 or more, not {value!r}")
        if policy.rounds_a_day is not None and policy.log is None:
            raise FedalignError('rounds-a-day needs a log, which counts them: add log="FILE" to the node\'s config')
        return policy

    def refuses(self, rule: Rule, own: Measure, broadcast: Broadcast, priority: bool, run: int = 0) -> str | None:
        """Return why this client takes no part in a round; None if it takes part."""
        if self.opt_out:
            return "opted out"
        if self.rounds_a_day is not None and self._rounds_with(run, broadcast.round, priority) > self.rounds_a_day:
            return f"{self.rounds_a_day} rounds a day are enough"
        if priority:
            return None
        if self.max_loss is not None and own.loss > self.max_loss:
            return f"loss {own.loss:.4g} is above its limit {self.max_loss:g}"
        if self.max_epsilon is not None and broadcast.epsilon is not None and broadcast.epsilon > self.max_epsilon:
            broadcast = replace(broadcast, epsilon=self.max_epsilon)
        return None if rule.offers(own, broadcast) else rule.why(own, broadcast, False)

    def note(self, own: Measure, broadcast: Broadcast, refusal: str | None, run: int = 0) -> None:
        """Add a line to the log: the model's loss on this client, the broadcast, and whether the client trained."""
        if self.log is None:
            return
        line = {
            "time": round(time.time(), 3),
            "run": str(run),
            "round": broadcast.round,
            "loss": own.loss,
            "accuracy": own.accuracy,
            "global_loss": broadcast.loss,
            "trained": refusal is None,
            "reason": refusal or "",
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _rounds_with(self, run: int, round: int, priority: bool) -> int:
        """Count the rounds of the last 24 hours in which the client trained, including the one it is asked for.

        A priority client may train two models in a round of AutoALIGN, the training model and the priority-only model.
        A third one counts as another round.
        """
        assert self.log is not None
        since, trained = time.time() - _DAY, Counter({(str(run), round): 1})
        for line in self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else ():
            try:
                row = json.loads(line)
                if row["trained"] and float(row["time"]) > since:
                    trained[row.get("run", ""), row["round"]] += 1
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FedalignError(f"{self.log} has a damaged line: {error}") from error
        return sum(math.ceil(models / (2 if priority else 1)) for models in trained.values())
