"""Asks clients over the Grid to measure models, in messages of limited size, and reads the replies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flwr.app import RecordDict

from fedalign.flower.early_measures import EarlyMeasures, Key, digest
from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.flower.wire import MEASURE, get_measure, get_outcomes, put_model, put_task
from fedalign.protocol.messages import Evaluate, Lost, Measures, Outcomes, Paired
from fedalign.rules.rule import Measure

_LARGEST = 512 << 20  # bytes of models in one message; a client holds all of them in memory


class Measuring:
    """Answers requests for measures. ``early`` has those that clients gave before the algorithm asks for them."""

    def __init__(self, exchange: Exchange, members: Members, rounds: int) -> None:
        self._exchange, self._members, self._rounds = exchange, members, rounds
        self.early = EarlyMeasures()

    def evaluate(self, request: Evaluate) -> list[Measures]:
        """Send each client all its models, in one message unless they are too large for that.

        A round ends with test measures, and the next one begins with a loss. The priority clients measure both in one
        exchange.
        """
        if (known := self.early.recall(request)) is not None:
            return known
        models: dict[int, list[torch.Tensor]] = {}
        places = []
        for model, clients in request.asked:
            for k in clients:
                models.setdefault(k, []).append(model)
            places.append({k: len(models[k]) - 1 for k in clients})
        ahead = [(digest(model), model, split) for model, split in request.ahead]
        splits = "+".join(dict.fromkeys([request.split, *(split for _, _, split in ahead)]))
        where: dict[Key, int] = {}
        for k, own in models.items():
            digests = [digest(model) for model in own] if ahead else []
            for name, model, split in ahead:
                if name not in digests:
                    own.append(model)
                    digests.append(name)
                where[name, split, k] = digests.index(name)
        found = self._measures(models, splits)
        if ahead:
            self.early.store({key: found.get((key[2], key[1], place)) for key, place in where.items()})
        replies = [{k: found.get((k, request.split, place)) for k, place in of_model.items()} for of_model in places]
        return [{k: one for k, one in of_model.items() if one is not None} for of_model in replies]

    def compare(self, request: Paired) -> dict[int, Outcomes]:
        """Send each client both models; a reply that makes no sense counts as none."""
        asked = {k: self._question(k, request.models, request.split, paired=True) for k in request.clients}
        answers = self._exchange(MEASURE, asked, "comparison")
        read = {k: get_outcomes(answer) for k, answer in answers.items() if not isinstance(answer, Lost)}
        return {k: outcomes for k, outcomes in read.items() if outcomes is not None}

    def _measures(
        self, models: dict[int, list[torch.Tensor]], splits: str
    ) -> dict[tuple[int, str, int], Measure | None]:
        """Return measures by client, split and the model's place among the client's; those that are lost are missing.

        Clients that have more models than fit in a message get them in several exchanges.
        """
        found: dict[tuple[int, str, int], Measure | None] = {}
        most = most_models(next(iter(models.values()))[0], _LARGEST) if models else 1
        for first in range(0, max(map(len, models.values()), default=0), most):
            parts = {k: own[first : first + most] for k, own in models.items() if own[first:]}
            answers = self._exchange(MEASURE, {k: self._question(k, part, splits) for k, part in parts.items()}, splits)
            for k, answer in answers.items():
                if not isinstance(answer, Lost):
                    for split in splits.split("+"):
                        for i in range(len(parts[k])):
                            found[k, split, first + i] = get_measure(answer, f"{split}-{i}")
        return found

    def _question(self, k: int, models: Sequence[torch.Tensor], splits: str, *, paired: bool = False) -> RecordDict:
        content = RecordDict()
        put_model(content, torch.stack(list(models)))
        put_task(content, k, 0, self._rounds, splits, self._members.is_priority(k), None, paired=paired)
        return content


def most_models(model: torch.Tensor, largest: int) -> int:
    """Return how many models of this size fit in a message of ``largest`` bytes: at least one.

    >>> most_models(torch.zeros(1000), largest=10_000)
    2
    """
    return max(1, largest // (model.numel() * model.element_size()))
