"""Sends models to clients as cheaply as it can: by name where a client has them, else packed against one it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import Array, ConfigRecord, RecordDict

from fedalign.flower.exchange import Exchange
from fedalign.flower.model_cache import digest
from fedalign.flower.packing import Packing, closeness
from fedalign.flower.parcels import MISSING, Parcel, get_updates, put_parcels
from fedalign.flower.wire import put_models
from fedalign.protocol.messages import Lost

_SHELF = 1 << 30  # bytes of models that the server keeps to pack others against
_MOST_NAMES = 256  # that it remembers of a client
_MOST_LOSSES = 3  # of a client's cache; after that it is not relied on


@dataclass
class Traffic:
    """What crossed the wire in a round: models, and bytes of messages' contents, from and to all clients.

    A model that is named by its hash is not sent, and not counted. Nor is a message that was not sent, as to a client
    that is still busy. SCAFFOLD's correction is as large as a model; the bytes have it, and the models do not.
    """

    models_down: int = 0
    models_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(frozen=True)
class Order:
    """A message to a client: its models, and the rest of its content."""

    models: Sequence[torch.Tensor]
    content: RecordDict


class Shipping:
    """Exchanges messages with models, and knows which models every client has. ``traffic`` counts since it was set."""

    def __init__(self, exchange: Exchange, packing: Packing, cache: bool) -> None:
        self._exchange, self._packing, self._cache = exchange, packing, cache
        self._exact = replace(packing, transport="exact")
        self._initial = digest(packing.initial)
        self._shelf: OrderedDict[str, torch.Tensor] = OrderedDict({self._initial: packing.initial})
        self._sent: dict[str, str] = {}  # the digest of a model: that of what clients get
        self._bases: dict[str, str] = {}  # what a rounded model was rounded against
        self._has: dict[int, dict[str, None]] = {}
        self._losses: dict[int, int] = {}
        self._packed: dict[tuple[str, str], bytes] = {}
        self.traffic = Traffic()

    def __call__(self, kind: str, orders: Mapping[int, Order], purpose: str) -> dict[int, RecordDict | Lost]:
        """Send each client its message and return the replies, or why there is none.

        A client that has lost a model says so, once, and gets the message again with all its models whole.
        """
        names = {k: self._names(order.models, orders) for k, order in orders.items()}
        contents = {k: self._content(k, order, names[k]) for k, order in orders.items()}
        answers = self._exchanged(kind, orders, contents, purpose)
        if again := [k for k, answer in answers.items() if not isinstance(answer, Lost) and MISSING in answer]:
            for k in again:
                self._has[k] = {}
                self._losses[k] = self._losses.get(k, 0) + 1
            whole = {k: self._content(k, orders[k], names[k], whole=True) for k in again}
            answers |= self._exchanged(kind, orders, whole, purpose, again=True)
        for k, answer in answers.items():
            if not isinstance(answer, Lost) and MISSING in answer:
                answers[k] = Lost("it lost the models of a message twice")
            elif not isinstance(answer, Lost):
                self._note(k, names[k])
                self.traffic.models_up += len(orders[k].models) if "model" in answer else 0
        self._packed.clear()
        self._trim({name for of_client in names.values() for name in of_client})
        return answers

    def sent(self, model: torch.Tensor) -> torch.Tensor:
        """Return what clients have of a model that was sent: itself, unless it is rounded or has frozen parameters."""
        return self._shelf.get(self._sent.get(digest(model), ""), model)

    def updates(self, answer: RecordDict, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a client trained, given the models that it received (:meth:`sent`).

        Raises :class:`FedalignError` if it sent something else.
        """
        return get_updates(answer, received, self._packing)

    def _exchanged(
        self,
        kind: str,
        orders: Mapping[int, Order],
        contents: Mapping[int, RecordDict],
        purpose: str,
        *,
        again: bool = False,
    ) -> dict[int, RecordDict | Lost]:
        answers = self._exchange(kind, contents, purpose, again=again)
        for k in self._exchange.posted_to:
            self.traffic.models_down += _models_in(contents[k], len(orders[k].models))
            self.traffic.bytes_down += _size(contents[k])
        self.traffic.bytes_up += sum(_size(answer) for answer in answers.values() if not isinstance(answer, Lost))
        return answers

    def _names(self, models: Sequence[torch.Tensor], clients: Iterable[int]) -> list[str]:
        """Return the digests of what clients get of these models, and put that on the shelf."""
        found = []
        for model in models:
            own = digest(model)
            if self._sent.get(own) not in self._shelf:
                base = self._closest(model, set(self._shelf).intersection(*(self._known(k) for k in clients)))
                made = self._packing.rounded(model, self._shelf[base])
                self._sent[own] = name = own if made is model else digest(made)
                self._bases[name] = base
                self._shelf[name] = made
            self._shelf.move_to_end(self._sent[own])
            found.append(self._sent[own])
        return found

    def _trim(self, used: set[str]) -> None:
        """Keep the models of the last messages, and as many others as the shelf may hold."""
        size = len(self._packing.initial) * self._packing.initial.dtype.itemsize
        spare = max(0, len(self._shelf) - 1 - max(len(used), _SHELF // max(1, size)))
        for name in [name for name in self._shelf if name != self._initial and name not in used][:spare]:
            del self._shelf[name]
        self._sent = {own: name for own, name in self._sent.items() if name in self._shelf}
        self._bases = {name: base for name, base in self._bases.items() if name in self._shelf}

    def _content(self, k: int, order: Order, names: Sequence[str], whole: bool = False) -> RecordDict:
        content = RecordDict(dict(order.content))
        if self._packing.is_plain and not self._cache:
            put_models(content, [self._shelf[name] for name in names])
            return content
        known = set() if whole else self._known(k)
        parcels = []
        for name in names:
            parcels.append(Parcel(name) if name in known else self._parcel(name, known))
            known = known | {name}
        put_parcels(content, parcels)
        return content

    def _parcel(self, name: str, known: set[str]) -> Parcel:
        model, base = self._shelf[name], self._bases.get(name, "")
        rounded = self._packing.transport != "exact" and base in known and base in self._shelf
        if not rounded:
            base = self._closest(model, known.intersection(self._shelf)) if known else ""
        if (name, base) not in self._packed:
            packing = self._packing if rounded else self._exact
            self._packed[name, base] = packing.pack(model, self._shelf[base] if base else None)
        return Parcel(name, base, rounded, self._packed[name, base])

    def _closest(self, model: torch.Tensor, known: Iterable[str]) -> str:
        """Return the known model that differs least from one."""
        return min(known, key=lambda name: (closeness(model, self._shelf[name]), name), default=self._initial)

    def _known(self, k: int) -> set[str]:
        """Return the models that a client has; both sides make the initial one themselves."""
        if self._losses.get(k, 0) >= _MOST_LOSSES:
            return set()
        return {self._initial, *self._has.get(k, ())}

    def _note(self, k: int, names: Sequence[str]) -> None:
        if self._cache and self._losses.get(k, 0) < _MOST_LOSSES:
            known = self._has.setdefault(k, {})
            for name in names:
                known.pop(name, None)
                known[name] = None
            while len(known) > _MOST_NAMES:
                del known[next(iter(known))]


def _models_in(content: RecordDict, count: int) -> int:
    """Return how many of the ``count`` models of a message it has, without those that it only names."""
    record = content.get("models")
    sent = record["sent"] if isinstance(record, ConfigRecord) else None
    return sum(map(bool, sent)) if isinstance(sent, list) else count


def _size(content: RecordDict) -> int:
    """Return the bytes of a message's content. Flower's own count raises for an empty text or list."""
    total = 0
    for record in content.values():
        for name, value in record.items():
            parts = value if isinstance(value, list) else [value]
            total += len(name) + sum(_bytes_of(part) for part in parts)
    return total


def _bytes_of(value: object) -> int:
    if isinstance(value, Array):
        return len(value.data)
    return len(value) if isinstance(value, str | bytes) else 1 if isinstance(value, bool) else 8
