"""What an aggregator is, and the weighted mean, which needs to hold no update."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from fedalign.errors import FedalignError
from fedalign.protocol.messages import Mix


class Accumulator(Protocol):
    """Takes clients' models one after another and combines them at the end."""

    def add(self, model: torch.Tensor, share: float) -> None:
        """Take one client's flat model and its share of the aggregate."""
        ...

    def result(self) -> torch.Tensor:
        """Return the aggregate of what was added."""
        ...


class Aggregator(abc.ABC):
    """Combines clients' models into one. Subclass it and define :meth:`combine`.

    An aggregator that can sum models as they arrive overrides :meth:`start` as well, and sets ``streams``; then a
    driver never holds all of them.

    >>> class Largest(Aggregator):
    ...     def combine(self, models, shares):
    ...         return models.max(0).values
    >>> both = Largest().start()
    >>> both.add(torch.tensor([1.0, 5.0]), 0.5)
    >>> both.add(torch.tensor([2.0, 4.0]), 0.5)
    >>> both.result()
    tensor([2., 5.])
    """

    streams: bool = False  #: True: models are summed as they arrive

    @abc.abstractmethod
    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Combine models (clients × numbers) with their shares, which sum to 1, into one flat model."""

    def start(self) -> Accumulator:
        """Begin an aggregate that holds the models until all are there."""
        return _Held(self)


class _Held:
    """Holds models until all are there."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._models: list[torch.Tensor] = []
        self._shares: list[float] = []

    def add(self, model: torch.Tensor, share: float) -> None:
        self._models.append(model)
        self._shares.append(share)

    def result(self) -> torch.Tensor:
        models = torch.stack(self._models)
        return self._aggregator.combine(models, models.new_tensor(self._shares))


class WeightedMean(Aggregator):
    """The mean with the clients' shares as weights, as in FedAvg and FedALIGN. It holds one model's numbers.

    >>> WeightedMean().combine(torch.tensor([[0.0, 2.0], [4.0, 6.0]]), torch.tensor([0.75, 0.25]))
    tensor([1., 3.])
    """

    streams = True

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return ``Σ share_k · w_k``."""
        return (models * shares[:, None]).sum(0)

    def start(self) -> Accumulator:
        """Begin a running sum."""
        return _Sum()


class _Sum:
    """Sums models as they arrive."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, model: torch.Tensor, share: float) -> None:
        weighted = model * share
        self._total = weighted if self._total is None else self._total.add_(weighted)

    def result(self) -> torch.Tensor:
        assert self._total is not None, "an aggregate has at least one client"
        return self._total


class Aggregation:
    """Several aggregates of one round, filled together as clients' models come. Both drivers use it.

    ``size`` is the number of trainable numbers, the first ones of a model: a mix's ``step`` multiplies an update there.
    """

    def __init__(self, aggregator: Aggregator, mixes: Sequence[Mix], size: int) -> None:
        self._aggregator, self._mixes, self._size = aggregator, mixes, size
        self._like: torch.Tensor | None = None
        self._parts = [aggregator.start() for _ in mixes]
        self._anchors = {mix.anchor: Anchor(mix.anchor, size) for mix in mixes if mix.anchor}
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        """Add a client's model to the aggregates that it has a share in; ``received`` is what it trained from."""
        self._like = received
        for anchor in self._anchors.values():
            anchor.add(client, model, received)
        self._waiting.append((client, model))
        if all(anchor.complete for anchor in self._anchors.values()):
            for k, one in self._waiting:
                self._add(k, one, received)
            self._waiting = []

    def _add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        for mix, part in zip(self._mixes, self._parts, strict=True):
            if client in mix.shares:
                moved = scaled(model, received, mix.step.get(client, 1.0), self._size)
                if mix.anchor:
                    moved = self._anchors[mix.anchor].bound(client, moved, received, mix.within)
                part.add(moved, mix.shares[client])

    def results(self) -> tuple[torch.Tensor, ...]:
        """Return one model for each mix; raises :class:`FedalignError` if an aggregator returned something else."""
        return tuple(self._checked(part.result()) for part in self._parts)

    def _checked(self, model: torch.Tensor) -> torch.Tensor:
        like, name = self._like, type(self._aggregator).__name__
        if self._aggregator.streams or like is None:
            return model
        if not isinstance(model, torch.Tensor) or model.shape != like.shape or model.dtype != like.dtype:
            kind = f"{tuple(model.shape)} of {model.dtype}" if isinstance(model, torch.Tensor) else type(model).__name__
            raise FedalignError(f"{name}.combine must return {tuple(like.shape)} of {like.dtype}, not {kind}")
        if not torch.isfinite(model).all():
            raise FedalignError(f"{name}.combine returned numbers that are not finite")
        return model


def scaled(model: torch.Tensor, received: torch.Tensor, step: float, size: int) -> torch.Tensor:
    """Multiply a model's update in its first ``size`` numbers; the others, such as BatchNorm's statistics, stay."""
    if step == 1.0:
        return model
    moved = model.clone()
    moved[:size] = received[:size] + (model[:size] - received[:size]) * step
    return moved


class Anchor:
    """Trusted clients of a mix, which bound what the other clients' updates may do."""

    def __init__(self, clients: Sequence[int], size: int) -> None:
        self._missing, self._size = set(clients), size
        self._clients = frozenset(clients)
        self._updates: list[torch.Tensor] = []
        self._rest: list[torch.Tensor] = []
        self._bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def complete(self) -> bool:
        """Whether all trusted clients' models are there."""
        return not self._missing

    def add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        """Take a model, if it is a trusted client's."""
        if client in self._missing:
            self._missing.discard(client)
            self._updates.append(model[: self._size] - received[: self._size])
            self._rest.append(model[self._size :])

    def bound(self, client: int, model: torch.Tensor, received: torch.Tensor, within: float) -> torch.Tensor:
        """Return a client's model with the anchor's statistics, and its update within the anchor's bounds."""
        if self._bounds is None:
            stacked = torch.stack(self._updates)
            centre = stacked.mean(0)
            spread = stacked.std(0) if len(stacked) > 1 else centre.abs()
            self._bounds = centre, spread, torch.stack(self._rest).mean(0)
        centre, spread, rest = self._bounds
        if client in self._clients:
            return model
        moved = model.clone()
        moved[self._size :] = rest
        if within < math.inf:
            update = moved[: self._size] - received[: self._size]
            update = torch.maximum(torch.minimum(update, centre + within * spread), centre - within * spread)
            moved[: self._size] = received[: self._size] + update
        return moved


def clients_of(mixes: Iterable[Mix]) -> set[int]:
    """Return the clients that have a share in some mix."""
    return {k for mix in mixes for k in mix.shares}
