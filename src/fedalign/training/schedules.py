"""Schedules of ε_t and η_t: numbers that change from round to round, or from local step to local step."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from fedalign.errors import FedalignError, nearest


class Schedule(abc.ABC):
    """A number that depends on time. Subclass it and define :meth:`at`; a plain callable of ``t`` works too.

    ``counts`` says what ``t`` counts if the schedule is a learning rate: rounds, or the local steps of a client since
    round 0. A schedule of ε is always evaluated once per round.
    """

    counts: ClassVar[Literal["rounds", "steps"]] = "rounds"

    @abc.abstractmethod
    def at(self, t: int, total: int) -> float:
        """Return the value at time ``t``, counted from 0, in a run of ``total`` rounds."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value in every round."""

    value: float

    def at(self, t: int, total: int) -> float:
        """Return the value, whatever the round."""
        return self.value


@dataclass(frozen=True)
class Linear(Schedule):
    """A straight line from ``start`` in round 0 to ``end`` in round ``over − 1`` (default: the last), then ``end``.

    >>> [Linear(0.4, 0.0).at(t, 5) for t in (0, 2, 4)]
    [0.4, 0.2, 0.0]
    """

    start: float
    end: float = 0.0
    over: int | None = None

    def at(self, t: int, total: int) -> float:
        """Return the point on the line at round ``t``."""
        done = _progress(t, self.over, total)
        return self.start * (1 - done) + self.end * done


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from ``start`` to ``end`` over ``over`` rounds (default: all), then ``end``."""

    start: float
    end: float = 0.0
    over: int | None = None

    def at(self, t: int, total: int) -> float:
        """Return the point on the cosine at round ``t``."""
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * _progress(t, self.over, total))) / 2


@dataclass(frozen=True)
class Exponential(Schedule):
    """``start · decay^t``.

    >>> Exponential(0.8, 0.5).at(2, 10)
    0.2
    """

    start: float
    decay: float

    def at(self, t: int, total: int) -> float:
        """Return ``start``, decayed ``t`` times."""
        return self.start * self.decay**t


@dataclass(frozen=True)
class Step(Schedule):
    """``start``, multiplied by ``factor`` after every ``every`` rounds.

    >>> [Step(1.0, 0.1, every=2).at(t, 4) for t in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """

    start: float
    factor: float
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise FedalignError(f"Step: every must be at least 1 round, not {self.every}")

    def at(self, t: int, total: int) -> float:
        """Return ``start``, multiplied by ``factor`` once for every completed period."""
        return self.start * self.factor ** (t // self.every)


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Constant pieces: ``((from_round, value), …)``, the first from round 0.

    >>> [Piecewise(((0, 0.2), (3, 0.0))).at(t, 5) for t in (0, 2, 3, 4)]
    [0.2, 0.2, 0.0, 0.0]
    """

    pieces: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        try:
            pieces = tuple((int(t), float(v)) for t, v in self.pieces)
        except (TypeError, ValueError) as error:
            raise FedalignError(f"Piecewise: pieces must be pairs (round, value), not {self.pieces!r}") from error
        object.__setattr__(self, "pieces", pieces)
        starts = [t for t, _ in pieces]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise FedalignError(f"Piecewise: pieces must start at round 0 and rise, not at {starts}")

    def at(self, t: int, total: int) -> float:
        """Return the value of the piece that contains round ``t``."""
        return [value for start, value in self.pieces if start <= t][-1]


@dataclass(frozen=True)
class InverseTime(Schedule):
    """``numerator / (mu · (t + gamma))``: the theory's η_t with numerator 2; as a learning rate it counts local steps.

    >>> InverseTime(mu=0.5, gamma=8).at(0, 1)
    0.5
    """

    mu: float
    gamma: float
    numerator: float = 2.0
    counts: ClassVar[Literal["rounds", "steps"]] = "steps"

    def __post_init__(self) -> None:
        if not (self.mu > 0 and self.gamma > 0):
            raise FedalignError(f"InverseTime: mu and gamma must be positive, not {self.mu} and {self.gamma}")

    def at(self, t: int, total: int) -> float:
        """Return the rate at local step ``t`` (at round ``t`` as ε)."""
        return self.numerator / (self.mu * (t + self.gamma))


@dataclass(frozen=True)
class Theory(Schedule):
    """The learning rate of the theorems, ``2/(μ(t + γ))``, with the constants of the experiment's federation.

    It is a placeholder without values: an experiment replaces it by an :class:`InverseTime`.
    """

    counts: ClassVar[Literal["rounds", "steps"]] = "steps"

    def at(self, t: int, total: int) -> float:
        """Raise ValueError, because the schedule has no values before an experiment replaces it."""
        raise ValueError('schedule "theory" needs the federation of an experiment')


@dataclass(frozen=True)
class FromCallable(Schedule):
    """A schedule that calls a Python function of the round."""

    function: Callable[[int], float]

    def at(self, t: int, total: int) -> float:
        """Return the value of the function at ``t``."""
        return float(self.function(t))


BY_NAME: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "step": Step,
    "piecewise": Piecewise,
    "inverse-time": InverseTime,
    "theory": Theory,
}

Schedulable = float | Schedule | Callable[[int], float]


def as_schedule(value: Schedulable | Mapping[str, Any], what: str) -> Schedule:
    """Return a schedule from a number, a callable of the round, or a table like ``{schedule = "linear", start = 0.4}``.

    >>> as_schedule({"schedule": "linear", "start": 0.4}, "epsilon")
    Linear(start=0.4, end=0.0, over=None)
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, bool) or value is None:
        raise FedalignError(f"{what} must be a number, a schedule or a callable, not {value!r}")
    if isinstance(value, numbers.Real):
        return Constant(float(value))
    if isinstance(value, Mapping):
        return _from_table(dict(value), what)
    if callable(value):
        return FromCallable(value)
    raise FedalignError(f"{what} must be a number, a schedule or a callable, not {value!r}")


def values(schedule: Schedule, rounds: int, what: str, *, positive: bool = False) -> list[float]:
    """Return the values in all rounds; refuse NaN and negative values, with ``positive`` also zero and infinity."""
    found = []
    for t in range(rounds):
        try:
            value = float(schedule.at(t, rounds))
        except (OverflowError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FedalignError(f"{what} cannot be computed in round {t}: {error}") from error
        found.append(value)
        if math.isnan(value) or value < 0 or (positive and not 0 < value < math.inf):
            need = "a positive number" if positive else "a number of at least 0 (inf admits everyone)"
            raise FedalignError(f"{what} is {value} in round {t}; it must be {need}")
    return found


def _from_table(table: dict[str, Any], what: str) -> Schedule:
    name = table.pop("schedule", None)
    if not isinstance(name, str) or name not in BY_NAME:
        raise FedalignError(f"{what}: unknown schedule {name!r}; {nearest(str(name), BY_NAME)}")
    kind = BY_NAME[name]
    known = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in known:
            raise FedalignError(f"{what}: schedule {name!r} has no key {key!r}; {nearest(key, known)}")
        wanted = int if known[key].startswith("int") else numbers.Real
        if key != "pieces" and (isinstance(value, bool) or not isinstance(value, wanted)):
            need = "a whole number" if wanted is int else "a number"
            raise FedalignError(f"{what}: {key} of schedule {name!r} must be {need}, not {value!r}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in table]  # type: ignore[arg-type]
    if missing:
        raise FedalignError(f"{what}: schedule {name!r} needs {missing[0]!r}")
    return kind(**table)


def _progress(t: int, over: int | None, total: int) -> float:
    span = (total if over is None else over) - 1
    return 1.0 if span <= 0 else min(max(t / span, 0.0), 1.0)
