"""The hostile clients of a run: their data, what they report, and what they send in place of updates.

The functions are for one client and its own data, so a hostile node over Flower does what a simulated one does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Attack, Samples, Scene, Updates
from fedalign.data.federation import Federation, Rows
from fedalign.data.samples import Pool
from fedalign.errors import FedalignError
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Broadcast, Measure, Split
from fedalign.training.randomness import Purpose, hashed

_POISONED: tuple[Split, ...] = ("train", "heldout")  # a client's test data stay as they are


class HostileClients:
    """An adversary's clients in a federation. Everything is a function of the seed and the round; there is no state."""

    def __init__(self, adversary: Adversary, federation: Federation, seed: int, rounds: int) -> None:
        self.adversary, self._federation, self._seed, self._rounds = adversary, federation, seed, rounds
        self.clients = hostile_clients(adversary, federation.roster, seed)
        if not any(adversary.active(t, rounds) for t in range(rounds)):
            raise FedalignError(
                f"adversary.start is {adversary.start:g}, but the run has {rounds} rounds: nobody attacks"
            )
        self._poisoned: Pool | None = None
        self._rows: dict[tuple[int, str], Rows] = {}
        if self.clients and any(attack.changes_data for attack in adversary.attacks):
            self._poison()
        self._trigger = next((attack for attack in adversary.attacks if attack.has_trigger), None)

    @property
    def pools(self) -> list[Pool]:
        """The samples that only the adversary has, for the engine to hold."""
        return [pool for pool in (self._poisoned, self.stamped) if pool is not None]

    def claimed(self, honest: Roster) -> Roster:
        """Return a roster with the sample counts that the hostile clients claim."""
        claimed = {k: claimed_samples(self.adversary, honest.samples[k]) for k in self.clients}
        return replace(honest, samples=tuple(claimed.get(k, n) for k, n in enumerate(honest.samples)))

    def active(self, k: int, round: int) -> bool:
        """Say whether a client is hostile in a round."""
        return k in self.clients and self.adversary.active(round, self._rounds)

    def crafts(self, round: int) -> bool:
        """Say whether updates are changed in a round."""
        changes = any(attack.changes_updates for attack in self.adversary.attacks)
        return changes and bool(self.clients) and self.adversary.active(round, self._rounds)

    def data(self, k: int, split: Split, round: int) -> tuple[Pool, Rows]:
        """Return the pool and the rows that a client measures or trains on; its test data stay as they are."""
        if self._poisoned is not None and (k, split) in self._rows and self.active(k, round):
            return self._poisoned, self._rows[k, split]
        return self._federation.pool, self._federation.clients[k].rows(split)

    def report(self, own: Measure, broadcast: Broadcast) -> Measure | None:
        """Return the measure that a hostile client claims; None: its own, and it follows the rule."""
        return claimed_measure(self.adversary, own, broadcast)

    def craft(
        self, models: Mapping[int, torch.Tensor], received: torch.Tensor, size: int, round: int
    ) -> dict[int, torch.Tensor]:
        """Return the models that the hostile clients send, given all models that clients trained in the round.

        ``size`` is the number of trainable numbers, the first ones of a model.
        """
        hostile = {k: model for k, model in models.items() if self.active(k, round)}
        if not hostile:
            return {}
        honest = [model[:size] - received[:size] for k, model in models.items() if k not in hostile]
        seen = honest if self.adversary.knows == "all" else []
        return crafted_models(self.adversary, hostile, received, size, Scene(self._seed, round, self._rounds), seen)

    @cached_property
    def stamped(self) -> Pool | None:
        """The priority clients' test samples with the trigger, labelled as the attackers want; None without one."""
        if self._trigger is None or not self.clients:
            return None
        clients = [client for client in self._federation.clients if client.priority and len(client.test)]
        if not clients:
            return None
        rows = np.unique(np.concatenate([client.test for client in clients]))
        pool = self._federation.pool
        x, y = self._trigger.stamp((pool.x[rows], pool.y[rows]))
        return Pool(x, y, pool.mean, pool.std) if len(y) else None

    def _poison(self) -> None:
        """Make the hostile clients' samples: training and held-out data, passed through all attacks on data."""
        pool, classes = self._federation.pool, 0
        if pool.has_classes:
            classes = int(pool.y.max()) + 1
        parts: list[Samples] = []
        offset = 0
        for k in sorted(self.clients):
            for split in _POISONED:
                rows = self._federation.clients[k].rows(split)
                if not len(rows):
                    continue
                own = pool.x[rows], pool.y[rows]
                parts.append(poisoned(self.adversary, own, split, classes, self._seed, k))
                self._rows[k, split] = np.arange(offset, offset + len(rows), dtype=np.int64)
                offset += len(rows)
        self._poisoned = Pool(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), pool.mean, pool.std)


def hostile_clients(adversary: Adversary, roster: Roster, seed: int) -> frozenset[int]:
    """Return the clients that are hostile: those that are named, or a fraction of the free clients, drawn by the seed.

    A fraction above 0 is at least one client. A larger fraction contains a smaller one's clients.

    >>> roster = Roster(tuple("abcde"), (True, False, False, False, False), (1,) * 5)
    >>> len(hostile_clients(Adversary("zero", fraction=0.5), roster, seed=0))
    2
    """
    free = [k for k, priority in enumerate(roster.priority) if not priority]
    if adversary.clients is not None:
        numbers = {name: k for k, name in enumerate(roster.names)}
        for name in adversary.clients:
            if numbers.get(str(name)) not in free:
                raise FedalignError(f"adversary.clients names {name!r}, which is no free client")
        return frozenset(numbers[str(name)] for name in adversary.clients)
    order = sorted(free, key=lambda k: int(hashed(seed, Purpose.ADVERSARY, k)))
    count = round(adversary.fraction * len(free))
    return frozenset(order[: max(count, 1) if adversary.fraction > 0 else 0])


def poisoned(adversary: Adversary, samples: Samples, split: Split, classes: int, seed: int, client: int) -> Samples:
    """Return a split of a hostile client's data as its attacks leave it; test data stay as they are.

    ``seed`` is the run's, and ``client`` the client's number: both fix what is random.
    """
    if split in _POISONED:
        for attack in adversary.attacks:
            found = attack.poison(samples, classes, int(hashed(seed, client, _POISONED.index(split))) >> 1)
            samples = _checked_samples(attack, found, samples, classes)
    return samples


def _checked_samples(attack: Attack, found: Any, samples: Samples, classes: int) -> Samples:
    """Return what an attack made of samples: as many, of the same shape and type, with labels of the task's classes."""
    name = f"{type(attack).__name__}.poison"
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(one, torch.Tensor) for one in found):
        raise FedalignError(f"{name} must give two tensors, features and labels, not {type(found).__name__}")
    for new, old, what in zip(found, samples, ("features", "labels"), strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise FedalignError(
                f"{name} gives {what} of shape {tuple(new.shape)} and type {new.dtype}; "
                f"they must have the shape {tuple(old.shape)} and the type {old.dtype} of the client's own"
            )
    labels = found[1]
    if classes and not labels.is_floating_point() and not bool(((labels >= 0) & (labels < classes)).all()):
        raise FedalignError(f"{name} gives labels that are not from 0 to {classes - 1}")
    return found


def claimed_samples(adversary: Adversary, samples: int) -> int:
    """Return the sample count that a hostile client claims.

    >>> claimed_samples(Adversary("zero", samples=100.0), 60)
    6000
    """
    return max(1, round(min(samples * adversary.samples, sys.float_info.max)))


def claimed_measure(adversary: Adversary, own: Measure, broadcast: Broadcast) -> Measure | None:
    """Return the measure that a hostile client claims; None: its own, and it follows the rule.

    >>> claimed_measure(Adversary("zero"), Measure(9.0, 0.1, 20), Broadcast(round=3, loss=0.5, accuracy=0.8))
    Measure(loss=0.5, accuracy=0.8, samples=20)
    """
    kind = adversary.report
    if kind == "truthful":
        return None
    factor = {"aligned": 1.0, "high": 100.0, "low": 0.01}[kind]
    accuracy = broadcast.accuracy if kind == "aligned" else {"high": 0.0, "low": 1.0}[kind]
    return Measure(broadcast.loss * factor, None if own.accuracy is None else accuracy, own.samples)


def crafted_models(
    adversary: Adversary, hostile: Mapping[int, torch.Tensor], received: torch.Tensor, size: int, scene: Scene,
    seen: Sequence[torch.Tensor] = (),
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Return the models that hostile clients send, given those that they trained.

    ``size`` is the number of trainable numbers, the first ones of a model. ``seen`` are the honest updates that the
    attackers know; without any they know their own. Raises :class:`FedalignError` for an attack that sends an update
    of another shape.
    """
    own: Mapping[int, torch.Tensor] = {k: model[:size] - received[:size] for k, model in hostile.items()}
    known = torch.stack(list(seen) or list(own.values()))
    sent = {k: model.clone() for k, model in hostile.items()}
    for attack in adversary.attacks:
        if not attack.changes_updates:
            continue
        own = attack.send(Updates(own, known), scene)
        if not isinstance(own, Mapping) or not all(isinstance(one, torch.Tensor) for one in own.values()):
            raise FedalignError(f"{type(attack).__name__}.send must give a tensor for each hostile client")
        if own.keys() != hostile.keys():
            raise FedalignError(
                f"{type(attack).__name__}.send gives updates for clients {sorted(own)}, not {sorted(hostile)}"
            )
        for model in sent.values():
            model[size:] = attack.spoil(model[size:])
    for k, model in sent.items():
        if own[k].shape != (size,):
            raise FedalignError(f"an attack sends an update of shape {tuple(own[k].shape)}, not {(size,)}")
        model[:size] = received[:size] + own[k]
    return sent
