"""What an aggregator is, the weighted mean, which needs to hold no update, and how a round fills its aggregates."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fedalign.aggregation.anchor import Anchor
from fedalign.aggregation.rows import weighted_sum
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


@dataclass(frozen=True)
class AggregateContext:
    """Where the models of an aggregate come from: the received model, the clients, the seed and the round.

    ``size`` is the number of trainable numbers, the first ones of a model; behind them are statistics, such as
    BatchNorm's. ``received`` is the model that the clients trained from. ``clients`` has the client of every row. An
    aggregator that draws random numbers hashes the seed, the round and the clients.
    """

    size: int
    received: torch.Tensor
    clients: tuple[int, ...]
    seed: int = 0
    round: int = 0


class Aggregator(abc.ABC):
    """Combines clients' models into one. Subclass it and define :meth:`combine`.

    Set ``on_updates`` to get updates instead of models: the trainable part of ``w_k − w``. The result is then added to
    ``w``, and the statistics of a model (such as BatchNorm's) become their weighted mean.

    An aggregator that can sum models as they arrive overrides :meth:`start` as well, and sets ``streams``; then a
    driver never holds all of them. One that needs to know more, such as the round, is a :class:`ContextAggregator`.

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
    on_updates: bool = False  #: True: ``combine`` gets updates, and returns one

    @abc.abstractmethod
    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Combine models (clients × numbers) with their shares, which sum to 1, into one flat model.

        Rows are in the order of the clients' numbers, in both drivers.
        """

    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Combine whole models into one, by :meth:`combine`; an aggregator ``on_updates`` gets their updates.

        Raises :class:`FedalignError` if :meth:`combine` returns anything but a finite update where it gets updates.
        """
        if not self.on_updates:
            return self.combine(models, shares)
        start, size = context.received, context.size
        update = checked(self, self.combine(models[:, :size] - start[:size], shares), start[:size])
        return torch.cat([start[:size] + update, weighted_sum(models[:, size:], shares)])

    def start(self) -> Accumulator:
        """Begin an aggregate that holds the models until all are there."""
        return _Held(self)


class ContextAggregator(Aggregator):
    """An aggregator that needs an :class:`AggregateContext`. Subclass it and define :meth:`combine_in`."""

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Combine vectors with no context: all their numbers are trainable, and the received model is zero."""
        clients, size = models.shape
        return self.combine_in(models, shares, AggregateContext(size, models.new_zeros(size), tuple(range(clients))))

    @abc.abstractmethod
    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Combine whole models (clients × numbers) with their shares, which sum to 1, into one flat model."""


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

    def result_in(self, context: AggregateContext) -> torch.Tensor:
        """Combine with a context, whose clients are in the order in which they were added."""
        order = sorted(range(len(self._models)), key=context.clients.__getitem__)
        models = torch.stack([self._models[i] for i in order])
        shares = models.new_tensor([self._shares[i] for i in order])
        ordered = tuple(context.clients[i] for i in order)
        return self._aggregator.combine_in(models, shares, replace(context, clients=ordered))


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
    """Sums models as they arrive, those of 16-bit numbers in float32: else the sum would depend on their order."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._dtype = torch.float32

    def add(self, model: torch.Tensor, share: float) -> None:
        self._dtype = model.dtype
        weighted = (model.float() if model.itemsize < 4 else model) * share
        self._total = weighted if self._total is None else self._total.add_(weighted)

    def result(self) -> torch.Tensor:
        assert self._total is not None, "an aggregate has at least one client"
        return self._total.to(self._dtype)


class Aggregation:
    """Several aggregates of one round, filled together as clients' models come. Both drivers use it.

    ``size`` is the number of trainable numbers, the first ones of a model: a mix's ``step`` multiplies an update there.
    The seed and the round are for aggregators that draw random numbers.
    """

    def __init__(
        self, aggregator: Aggregator, mixes: Sequence[Mix], size: int, *, seed: int = 0, round: int = 0
    ) -> None:
        self._aggregator, self._mixes, self._size = aggregator, mixes, size
        self._seed, self._round = seed, round
        self._received: torch.Tensor | None = None
        self._parts = [_Part(aggregator, size) for _ in mixes]
        self._weights = [Anchor.weights_of(mix) for mix in mixes]
        self._anchors = {weights: Anchor(dict(weights), size) for weights in self._weights if weights}
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        """Add a client's model to the aggregates that it has a share in; ``received`` is what it trained from."""
        self._received = received
        for anchor in self._anchors.values():
            anchor.add(client, model, received)
        self._waiting.append((client, model))
        if all(anchor.complete for anchor in self._anchors.values()):
            for k, one in self._waiting:
                self._add(k, one, received)
            self._waiting = []

    def _add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        same: dict[object, torch.Tensor] = {}  # what several mixes bound alike is made and held once
        for mix, part, weights in zip(self._mixes, self._parts, self._weights, strict=True):
            if client in mix.shares:
                step = mix.step.get(client, 1.0)
                bounds = step, weights, mix.within
                if bounds not in same:
                    moved = scaled(model, received, step, self._size)
                    same[bounds] = (
                        self._anchors[weights].bound(client, moved, received, mix.within) if weights else moved
                    )
                part.add(client, same[bounds], received, mix.shares[client])

    def results(self) -> tuple[torch.Tensor, ...]:
        """Return one model for each mix; raises :class:`FedalignError` if an aggregator returned something else."""
        received = self._received
        if not self._mixes:
            return ()
        assert received is not None, "an aggregate has at least one client"
        results = (
            part.result(AggregateContext(self._size, received, tuple(part.clients), self._seed, self._round))
            for part in self._parts
        )
        if self._aggregator.streams:
            return tuple(results)
        return tuple(checked(self._aggregator, model, received) for model in results)


class _Part:
    """One aggregate of a round. For an aggregator that streams updates, it turns models into updates and back."""

    def __init__(self, aggregator: Aggregator, size: int) -> None:
        self.clients: list[int] = []
        self._total, self._size = aggregator.start(), size
        self._statistics = _Sum() if aggregator.on_updates and not isinstance(self._total, _Held) else None

    def add(self, client: int, model: torch.Tensor, received: torch.Tensor, share: float) -> None:
        self.clients.append(client)
        if self._statistics is None:
            self._total.add(model, share)
        else:
            self._total.add(model[: self._size] - received[: self._size], share)
            self._statistics.add(model[self._size :], share)

    def result(self, context: AggregateContext) -> torch.Tensor:
        if isinstance(self._total, _Held):
            return self._total.result_in(context)
        if self._statistics is None:
            return self._total.result()
        return torch.cat([context.received[: self._size] + self._total.result(), self._statistics.result()])


def checked(aggregator: Aggregator, result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what an aggregator combined; raises :class:`FedalignError` if it is not finite, or not like ``like``."""
    name = type(aggregator).__name__
    if not isinstance(result, torch.Tensor) or result.shape != like.shape or result.dtype != like.dtype:
        kind = f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise FedalignError(f"{name}.combine must return {tuple(like.shape)} of {like.dtype}, not {kind}")
    if not torch.isfinite(result).all():
        raise FedalignError(f"{name}.combine returned numbers that are not finite")
    return result


def scaled(model: torch.Tensor, received: torch.Tensor, step: float, size: int) -> torch.Tensor:
    """Multiply a model's update in its first ``size`` numbers; the others, such as BatchNorm's statistics, stay."""
    if step == 1.0:
        return model
    moved = model.clone()
    moved[:size] = received[:size] + (model[:size] - received[:size]) * step
    return moved


def clients_of(mixes: Iterable[Mix]) -> set[int]:
    """Return the clients that have a share in some mix."""
    return {k for mix in mixes for k in mix.shares}
