"""Asks clients over the Grid to measure models, in messages of limited size, and reads the replies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict

from fedalign.flower.early_measures import EarlyMeasures, Key
from fedalign.flower.members import Members
from fedalign.flower.model_cache import digest
from fedalign.flower.shipping import Order, Shipping
from fedalign.flower.wire import MEASURE, get_measure, get_outcomes, put_questions
from fedalign.protocol.messages import Evaluate, Lost, Measures, Outcomes, Paired
from fedalign.rules.rule import Measure, Split

log = logging.getLogger("flwr")
_LARGEST = 512 << 20  # bytes of models in one message; a client holds all of them in memory


@dataclass
class _Questions:
    """What clients are asked, with models named by their digests: which to measure on which data, which to compare."""

    models: dict[str, torch.Tensor] = field(default_factory=dict)
    measures: dict[int, dict[tuple[str, Split], None]] = field(default_factory=dict)  # by client
    pair: tuple[str, str, Split] | None = None
    tempered: Split | None = None  # the split on which losses at other temperatures are asked for

    def name(self, model: torch.Tensor) -> str:
        """Return the digest of a model, and note the model."""
        name = digest(model)
        self.models.setdefault(name, model)
        return name

    def compare(self, models: tuple[torch.Tensor, torch.Tensor], split: Split) -> None:
        """Ask all clients to compare two models."""
        self.pair = (self.name(models[0]), self.name(models[1]), split)

    def parts(self, largest: int) -> list[dict[int, list[str]]]:
        """Return the models of each client, in as many exchanges as messages of ``largest`` bytes need.

        Two models that are only compared are always in one message.
        """
        pair = [] if self.pair is None else self.pair[:2]
        needed = {k: list(dict.fromkeys([*(name for name, _ in of), *pair])) for k, of in self.measures.items()}
        most = most_models(next(iter(self.models.values())), largest) if self.models else 1
        if not any(self.measures.values()):
            most = max(2, most)
        starts = range(0, max(map(len, needed.values()), default=0), most)
        return [{k: names[at : at + most] for k, names in needed.items() if names[at:]} for at in starts]


class Measuring:
    """Answers requests for measures. ``early`` has those that clients gave before the algorithm asks for them."""

    def __init__(self, shipping: Shipping, members: Members, rounds: int) -> None:
        self._shipping, self._members, self._rounds = shipping, members, rounds
        self.early = EarlyMeasures()
        self.failures: dict[int, str] = {}  #: why clients sent no measures in this round

    def evaluate(self, request: Evaluate) -> list[Measures]:
        """Send each client all its models, in one message unless they are too large for that.

        What the request announces, the same clients measure in the same exchange: a round of FedALIGN ends with test
        measures, and the next one begins with a loss.
        """
        if (known := self.early.recall(request)) is not None:
            return known
        asked = _Questions(tempered=request.split if request.tempered else None)
        names = [asked.name(model) for model, _ in request.asked]
        for name, (_, clients) in zip(names, request.asked, strict=True):
            for k in clients:
                asked.measures.setdefault(k, {})[name, request.split] = None
        ahead = [(asked.name(model), split) for model, split in request.ahead]
        for of_client in asked.measures.values():
            of_client |= dict.fromkeys(ahead)
        if request.paired is not None:
            asked.compare(request.paired, request.split)
        found, outcomes = self._ask(asked)
        if ahead:
            self.early.store({(*question, k): found.get((*question, k)) for question in ahead for k in asked.measures})
        if asked.pair is not None:
            self.early.store_outcomes(asked.pair, outcomes)
        replies = [
            {k: found.get((name, request.split, k)) for k in clients}
            for name, (_, clients) in zip(names, request.asked, strict=True)
        ]
        return [{k: one for k, one in of_model.items() if one is not None} for of_model in replies]

    def compare(self, request: Paired) -> dict[int, Outcomes]:
        """Send each client both models; a reply that makes no sense counts as none."""
        asked = _Questions(measures={k: {} for k in request.clients})
        asked.compare(request.models, request.split)
        assert asked.pair is not None
        known = self.early.outcomes(asked.pair, request.clients)
        return self._ask(asked)[1] if known is None else known

    def _ask(self, asked: _Questions) -> tuple[dict[Key, Measure], dict[int, Outcomes]]:
        """Return the measures by model, split and client, and how the pair compares; those that are lost are missing.

        Clients that have more models than fit in a message get them in several exchanges.
        """
        found: dict[Key, Measure] = {}
        outcomes: dict[int, Outcomes] = {}
        for part in asked.parts(_LARGEST):
            orders = {k: self._question(k, names, asked) for k, names in part.items()}
            splits = dict.fromkeys(split for of_client in asked.measures.values() for _, split in of_client)
            for k, answer in self._shipping(MEASURE, orders, "+".join(splits) or "comparison").items():
                if isinstance(answer, Lost):
                    log.warning("%s sent no measures: %s", self._members.name(k), answer.reason)
                    self.failures[k] = answer.reason
                    continue
                for name, split in asked.measures[k]:
                    if name in part[k] and (one := get_measure(answer, f"{split}-{part[k].index(name)}")) is not None:
                        found[name, split, k] = one
                if (compared := get_outcomes(answer)) is not None and asked.pair is not None:
                    outcomes[k] = compared
        return found, outcomes

    def _question(self, k: int, names: Sequence[str], asked: _Questions) -> Order:
        content = RecordDict()
        measures = [f"{split}-{names.index(name)}" for name, split in asked.measures[k] if name in names]
        pair = asked.pair
        compare = None
        if pair is not None and pair[0] in names and pair[1] in names:
            compare = (names.index(pair[0]), names.index(pair[1]), pair[2])
        put_questions(content, k, self._rounds, self._members.is_priority(k), measures, compare, asked.tempered)
        return Order([asked.models[name] for name in names], content)


def most_models(model: torch.Tensor, largest: int) -> int:
    """Return how many models of this size fit in a message of ``largest`` bytes: at least one.

    >>> most_models(torch.zeros(1000), largest=10_000)
    2
    """
    return max(1, largest // (model.numel() * model.element_size()))
