"""Delivers the final model to the nodes that may have it and whose owners keep it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from flwr.app import ConfigRecord, RecordDict

from fedalign.flower.audit import AuditLog
from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.flower.settings import Deliver
from fedalign.flower.wire import KEEP, put_model
from fedalign.protocol.messages import Lost
from fedalign.protocol.records import History

log = logging.getLogger("flwr")


def may_have(deliver: Deliver, members: Members, history: History) -> list[int]:
    """Return the clients that may have the final model.

    ``priority``: the priority clients; ``admitted``: also the free clients whose updates entered a model in some round;
    ``all``: every client. The roster may say otherwise of a client.
    """
    took_part = {c.id for r in history.rounds for c in r.clients if c.decision in ("trained", "admitted", "base")}
    chosen = []
    for k in range(len(members.roster())):
        usual = {
            "none": False,
            "priority": members.is_priority(k),
            "admitted": members.is_priority(k) or k in took_part,
            "all": True,
        }[deliver]
        listed = members.may_have_model(k)
        if usual if listed is None else listed:
            chosen.append(k)
    return chosen


def deliver_models(
    models: Mapping[str, torch.Tensor], clients: list[int], exchange: Exchange, members: Members, audit: AuditLog
) -> None:
    """Send models, such as the ``final`` one, to those of the clients that keep them; who got them is recorded.

    A client that does not answer is reported; a ``resume`` of the finished run delivers again.
    """
    for kind, model in models.items():
        contents = {}
        for k in clients:
            if k in members.keep_models:
                contents[k] = RecordDict({"task": ConfigRecord({"client": k, "kind": kind})})
                put_model(contents[k], model)
        for k, answer in exchange(KEEP, contents, "delivery").items():
            name = members.name(k)
            if isinstance(answer, Lost):
                log.warning("%s has not got the %s model: %s", name, kind, answer.reason)
                audit.add("model_not_delivered", name, kind=kind, reason=answer.reason)
            else:
                log.info("%s has got the %s model", name, kind)
                audit.add("model_delivered", name, kind=kind)
