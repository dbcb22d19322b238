"""What happened, round by round and client by client, with the reason for every inclusion and refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedalign.errors import FedalignError
from fedalign.protocol import metric_values
from fedalign.protocol.ledger_values import RoundValues
from fedalign.protocol.metric_values import MetricValues

if TYPE_CHECKING:
    import pandas as pd

#: trained: a priority client took part (or, in the `local` arm, any client trained alone); admitted: a free client's
#: update entered the aggregate; base: it entered the model that the next round starts from, and not the one that is
#: served (AutoALIGN); declined: it didn't offer; refused: it offered, and the server refused it; lost: no answer came;
#: absent: it was not reachable or not invited.
Decision = Literal["trained", "admitted", "base", "declined", "refused", "lost", "absent"]


@dataclass(frozen=True)
class ClientRound:
    """One client in one round.

    ``id`` is its number, ``weight`` its share of the aggregate; ``loss`` and ``accuracy`` are its own measures of the
    model it received.
    """

    id: int
    name: str
    priority: bool
    reachable: bool
    loss: float | None
    accuracy: float | None
    decision: Decision
    weight: float
    reason: str


@dataclass(frozen=True)
class Tried:
    """A candidate that the priority clients measured: its ε, its number of free clients, its loss on held-out data."""

    epsilon: float | None
    admitted: int
    loss: float | None
    chosen: bool = False


@dataclass(frozen=True)
class Fallback:
    """State of the priority-only fallback model after a round.

    ``apart``: it is a model of its own, with ``loss`` and ``accuracy`` on held-out data. ``deficit``: by how much the
    rule's choices are behind it, smoothed. ``behind``: the deficit is too large, so the priority clients are served
    the fallback model.
    """

    apart: bool = False
    loss: float | None = None
    accuracy: float | None = None
    deficit: float = 0.0
    behind: bool = False


@dataclass(frozen=True)
class Promise:
    """By how much the served model may be worse than the priority-only model, in accuracy on new samples.

    ``gained`` and ``lost`` count the held-out ``samples`` that only the served model, or only the priority-only model,
    classifies correctly. ``worse_by`` is an upper bound that holds in all rounds at once with probability 1 − ``alpha``
    if the models do not depend on these samples. ``strict`` also holds if the served model was chosen by them, as one
    of exp(``log_choices``); exp(``log_lasting``) of these are due to decisions that later rounds build on.
    ``chance`` is a p-value, as strict: a served model that is worse by more than ``delta`` has a chance of p to show
    outcomes with a value of p or less. ``evidence`` is that of an e-process against "never worse by more than
    ``delta``". docs/research/promise.md states the assumptions.
    """

    gained: float = 0.0
    lost: float = 0.0
    samples: int = 0
    worse_by: float | None = None
    strict: float | None = None
    chance: float | None = None
    alpha: float = 0.05
    delta: float = 0.01
    log_choices: float = 0.0
    log_lasting: float = 0.0
    evidence: float = 0.0

    @property
    def alarm(self) -> bool:
        """Whether the served model was worse by more than ``delta`` in some round; wrong with probability alpha."""
        return self.evidence >= 1 / self.alpha


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    ``global_*``: F(w) and its accuracy for the model that was broadcast.
    ``test_*`` and ``train_loss``: measures of the aggregate; ``train_loss`` is on the priority clients' training data.
    ``skipped``: why nothing was aggregated, or None.
    ``models_down`` and ``models_up``: number of models sent to and by clients; ``bytes_down`` and ``bytes_up``: over
    Flower, the bytes of all messages.
    ``samples``: number of samples that clients trained on, passes included.
    ``tried``: the candidates of a rule that lets the priority clients choose.
    ``fallback``: state of the priority-only model.
    ``base``: whether the next round starts from another model than the one that this round serves, which scores and
    weights are about.
    ``inclusion``: the theory's factor ``1/(1 + Σ p_k I_k)``, the priority clients' part of what the next round starts
    from; ``theta``: its mean over the rounds so far.
    ``objective`` (F with its regulariser, of the aggregate) and ``rho``: given where the theory's assumptions hold
    (docs/theory.md).
    ``attack_success``: where simulated clients plant a backdoor, the part of the priority clients' test samples with
    the trigger that the served model takes for the attackers' class.
    ``promise``: by how much the served model may be worse than the priority-only model, where both were compared.
    ``metrics``: the user's metrics of the served model, by name.
    ``ledger``: what each client gave, where a ledger is kept.
    ``heldout_*``: measures of the aggregate on the priority clients' held-out data, where there is no test data.
    """

    round: int
    epsilon: float | None
    global_loss: float | None
    global_accuracy: float | None
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    warmup: bool
    skipped: str | None
    models_down: int = field(compare=False)  # what a round cost over Flower depends on what nodes had before it
    models_up: int = field(compare=False)
    clients: tuple[ClientRound, ...]
    samples: int = 0
    tried: tuple[Tried, ...] = ()
    fallback: Fallback | None = None
    base: bool = False
    inclusion: float = 1.0
    theta: float = 1.0
    objective: float | None = None
    rho: float | None = None
    attack_success: float | None = None
    promise: Promise | None = None
    metrics: Mapping[str, MetricValues] = field(default_factory=dict)
    heldout_accuracy: float | None = None
    heldout_loss: float | None = None
    bytes_down: int | None = field(default=None, compare=False)
    bytes_up: int | None = field(default=None, compare=False)
    ledger: RoundValues | None = None

    @property
    def admitted(self) -> int:
        """How many free clients entered the aggregate."""
        return sum(c.decision == "admitted" for c in self.clients)

    def to_json(self) -> str:
        """Write one line of ``rounds.jsonl``. Strict JSON has no infinity: ε = ∞ is written as ``"inf"``."""
        # By hand: dataclasses.asdict takes several times as long, for every client of every round.
        row: dict[str, Any] = {**vars(self), "clients": [vars(c) for c in self.clients]}
        row["tried"] = [dict(vars(tried)) for tried in self.tried]
        row["fallback"] = None if self.fallback is None else vars(self.fallback)
        row["promise"] = None if self.promise is None else vars(self.promise)
        row["metrics"] = {name: metric_values.json_of(values) for name, values in self.metrics.items()}
        if self.ledger is None:
            del row["ledger"]  # a run without a ledger has the lines that it always had
        else:
            row["ledger"] = self.ledger.to_json()
        for part in (row, *row["tried"]):
            part["epsilon"] = "inf" if part["epsilon"] == math.inf else part["epsilon"]
        return json.dumps(_finite(row), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> RoundRecord:
        """Read such a line."""
        row = json.loads(line)
        for part in (row, *row.get("tried", ())):
            part["epsilon"] = math.inf if part["epsilon"] == "inf" else part["epsilon"]
        row["clients"] = tuple(ClientRound(**client) for client in row["clients"])
        row["tried"] = tuple(Tried(**tried) for tried in row.get("tried", ()))
        if fallback := row.get("fallback"):  # version 0.1 wrote more
            row["fallback"] = Fallback(**{name: fallback[name] for name in vars(Fallback()) if name in fallback})
        if promise := row.get("promise"):
            row["promise"] = Promise(**promise)
        if ledger := row.get("ledger"):
            row["ledger"] = RoundValues.from_json(ledger)
        row["metrics"] = {name: metric_values.from_json(own) for name, own in row.get("metrics", {}).items()}
        return cls(**row)


_IN_FRAME = (
    "round", "epsilon", "global_loss", "global_accuracy", "test_accuracy", "test_loss", "inclusion", "theta"
)  # fmt: skip


@dataclass
class History:
    """A run's rounds, in order."""

    rounds: list[RoundRecord] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, round: int) -> RoundRecord:
        return self.rounds[round]

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per round and client; the columns of the round repeat for each client.

        A metric has three columns: the client's own value, and the means over priority and over free clients.

        Raises :class:`FedalignError` if pandas, an optional dependency, is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise FedalignError("to_frame needs pandas: install it with pip install 'fedalign[pandas]'") from error

        rows: list[dict[str, Any]] = []
        for r in self.rounds:
            shared = {name: getattr(r, name) for name in _IN_FRAME}
            for name, values in r.metrics.items():
                shared |= {f"{name}.priority": values.priority, f"{name}.free": values.free}
            for client in r.clients:
                own = {f"{name}.client": values.clients[client.id] for name, values in r.metrics.items()}
                rows.append({**shared, **asdict(client), **own})
        return pd.DataFrame(rows)

    def final(self, name: str, last: int = 10) -> float | None:
        """Give the mean of a round's number over the last rounds: the final figure of summary.json."""
        return mean_or_none(self.values(name)[-last:])

    def values(self, name: str) -> list[float | None]:
        """Give a number of every round by its name: ``"test_accuracy"``, or a metric as ``"f1"`` or ``"f1.free"``.

        It is None in rounds that do not have it. Raises :class:`FedalignError` if no round has.
        """
        metric_values.check_name(name, list(dict.fromkeys(metric for r in self.rounds for metric in r.metrics)))
        return [metric_values.figure_of(r, name) for r in self.rounds]


def mean_or_none(numbers: Iterable[float | None]) -> float | None:
    """Average the numbers that are not None; None if there are none.

    >>> mean_or_none([1.0, None, 3.0])
    2.0
    """
    known: Sequence[float] = [n for n in numbers if n is not None]
    return sum(known) / len(known) if known else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
