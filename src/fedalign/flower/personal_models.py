"""Lets nodes make personal models of the final model. The models stay on the nodes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedalign.flower.audit import AuditLog
from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.flower.wire import PERSONAL, number, put_model
from fedalign.personal.method import PersonalOutcome
from fedalign.protocol.messages import Lost
from fedalign.rules.rule import Measure

log = logging.getLogger("flwr")


class PersonalModels:
    """Asks nodes for personal models; ``methods`` are the names of the methods, none of which needs other clients."""

    def __init__(self, methods: Iterable[str], exchange: Exchange, members: Members, audit: AuditLog) -> None:
        self._methods = list(methods)
        self._exchange, self._members, self._audit = exchange, members, audit

    def ask(
        self, model: torch.Tensor, allowed: Iterable[int], clients: int, rounds: int
    ) -> dict[str, tuple[PersonalOutcome | None, ...]]:
        """Send the final model to nodes that may have it and whose owners want personal models.

        Returns the test accuracies that owners let their nodes report, for the first ``clients`` of the roster. What a
        free client reports is not verified; no decision depends on it. A node that does not answer is reported.
        """
        if not self._methods:
            return {}
        contents = {}
        for k in allowed:
            if k in self._members.personal:
                contents[k] = RecordDict({"task": ConfigRecord({"client": k, "rounds": rounds})})
                put_model(contents[k], model)
        found: dict[str, dict[int, float]] = {name: {} for name in self._methods}
        for k, answer in self._exchange(PERSONAL, contents, "personal models").items():
            name = self._members.name(k)
            if isinstance(answer, Lost):
                log.warning("%s made no personal models: %s", name, answer.reason)
                self._audit.add("personal_models_failed", name, reason=answer.reason)
                continue
            self._audit.add("personal_models_made", name, methods=self._methods)
            for method, accuracy in get_accuracies(answer).items():
                if method in found:
                    found[method][k] = accuracy
        return {
            method: tuple(_outcome(own[k]) if k in own else None for k in range(clients))
            for method, own in found.items()
            if own
        }


def put_accuracies(content: RecordDict, outcomes: dict[str, PersonalOutcome]) -> None:
    """Put the test accuracies of personal models into a reply, and nothing else of the models."""
    tests = {name: outcome.test for name, outcome in outcomes.items()}
    content["personal"] = MetricRecord(
        {name: test.accuracy for name, test in tests.items() if test is not None and test.accuracy is not None}
    )


def get_accuracies(content: RecordDict) -> dict[str, float]:
    """Return the accuracies of a reply; those that cannot be accuracies are left out.

    >>> get_accuracies(RecordDict({"personal": MetricRecord({"refine": 0.5, "ditto": 1.5})}))
    {'refine': 0.5}
    """
    record = content.get("personal")
    values = {name: number(value) for name, value in record.items()} if isinstance(record, MetricRecord) else {}
    return {name: value for name, value in values.items() if value is not None and 0 <= value <= 1}


def _outcome(accuracy: float) -> PersonalOutcome:
    return PersonalOutcome(Measure(math.nan, accuracy, 0), None, None)  # the loss and the rest stay on the node
