"""The ClientApp: it measures the model, decides whether to take part, trains, and sends an update or a decline."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedalign.errors import FedalignError
from fedalign.flower.control_variates import get_correction
from fedalign.flower.declining import decline
from fedalign.flower.kept_model import keep_model
from fedalign.flower.model_cache import ModelCache, cache_folder
from fedalign.flower.node import Node
from fedalign.flower.parcels import MISSING, MissingModelError, get_parcels, put_updates
from fedalign.flower.personal_models import put_accuracies
from fedalign.flower.policy import Policy
from fedalign.flower.run_config import for_node
from fedalign.flower.settings import Settings
from fedalign.flower.wire import (
    MEASURE,
    get_broadcast,
    get_model,
    get_questions,
    losses,
    put_measures,
    put_outcomes,
    put_wishes,
)
from fedalign.ledger.receipt import read_account
from fedalign.rules.rule import Measure, Split

log = logging.getLogger("flwr")


def keep_policy(message: Message, context: Context, handle: ClientAppCallable) -> Message:
    """Ask the client's policy before anything is loaded or measured, whatever the message asks for."""
    policy, asked = Policy.read(context.node_config), message.metadata.message_type
    reason, details = policy.declines(), {}
    if reason is None and asked.split(".")[0] == "train":
        task = _task(message)
        details = {"round": int(task["round"])}
        reason = policy.declines_round(details["round"], bool(task["priority"]), context.run_id)
    if reason is None:
        reply = handle(message, context)
        if asked == MEASURE and not reply.has_error() and MISSING not in reply.content:
            policy.node_log.add(run=context.run_id, asked=asked, measured=losses(reply.content))
        return reply
    policy.node_log.add(run=context.run_id, asked=asked, **details, trained=False, reason=reason)
    return decline(message, reason)


def ask_again(message: Message, context: Context, handle: ClientAppCallable) -> Message:
    """Tell the server if the message names a model that is no longer in this node's cache: it then sends it whole."""
    try:
        return handle(message, context)
    except MissingModelError as error:
        return Message(RecordDict({MISSING: ConfigRecord({"model": str(error)})}), reply_to=message)


app = ClientApp(mods=[keep_policy, ask_again])


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Report how many samples this client has in each split, a fingerprint, and whether its owner keeps models."""
    node = _node(context)
    content = RecordDict({"samples": MetricRecord(dict(node.samples()))})
    content["data"] = ConfigRecord({"fingerprint": node.fingerprint()})
    policy = Policy.read(context.node_config)
    put_wishes(content, model=policy.keep_model is not None, personal=policy.wants_personal and node.is_personal)
    return Message(content, reply_to=message)


@app.query("keep")
def keep(message: Message, context: Context) -> Message:
    """Keep a model that the server delivers, in the file that the owner named; without one, decline it."""
    policy, node, kind = Policy.read(context.node_config), _node(context), str(_task(message)["kind"])
    if policy.keep_model is None:
        return decline(message, "its owner keeps no models")
    if kind != "final":  # each kind is a file
        return decline(message, "it keeps the final model alone")
    tensors = node.named_tensors(get_model(message.content, node.layout.size, node.layout.dtype))
    path = keep_model(policy.keep_model, kind, tensors, context.run_id)
    policy.node_log.add(run=context.run_id, asked=message.metadata.message_type, kept=str(path))
    return Message(RecordDict(), reply_to=message)


@app.query("personal")
def personal(message: Message, context: Context) -> Message:
    """Make personal models of the final model, and keep them where the owner keeps models.

    The reply has their test accuracies if the owner's policy allows that, and else nothing.
    """
    policy, node, task = Policy.read(context.node_config), _node(context), _task(message)
    if not policy.wants_personal:
        return decline(message, "its owner keeps no models and reports no accuracies")
    model = get_model(message.content, node.layout.size, node.layout.dtype)
    outcomes = node.personalise(model, int(task["client"]), int(task["rounds"]))
    kept = []
    if policy.keep_model is not None:
        for name, outcome in outcomes.items():
            tensors = node.named_tensors(outcome.model)
            kept.append(str(keep_model(policy.keep_model, name.replace("-", "_"), tensors, context.run_id)))
    tests = {name: None if one.test is None else one.test.accuracy for name, one in outcomes.items()}
    policy.node_log.add(run=context.run_id, asked=message.metadata.message_type, personal=tests, kept=kept)
    content = RecordDict()
    if policy.report_personal:
        put_accuracies(content, outcomes)
    return Message(content, reply_to=message)


@app.query("benched")
def benched(message: Message, context: Context) -> Message:
    """Note in the owner's log that the server leaves this client out for some rounds, because it missed several."""
    task = _task(message)
    rounds = int(task["rounds"])
    reason = f"the server benched this node for {rounds} rounds: its answers came too late, or could not be read"
    Policy.read(context.node_config).node_log.add(
        run=context.run_id, asked=message.metadata.message_type, round=int(task["until"]), benched=reason
    )
    log.warning(reason)
    return Message(RecordDict(), reply_to=message)


@app.query("account")
def account(message: Message, context: Context) -> Message:
    """Keep in the owner's log what the server's ledger says about this client; the reply is empty."""
    text = str(_task(message)["account"])
    if read_account(text) is None:
        raise FedalignError("the account that the server sent cannot be read, or has changed on its way")
    Policy.read(context.node_config).node_log.add(run=context.run_id, asked=message.metadata.message_type, account=text)
    return Message(RecordDict(), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the models of a message as its task says; the reply has a measure for each model and split.

    A task with ``compare`` asks how often only one of two models is right, one with ``metrics`` for those of the
    settings.
    """
    node, task = _node(context), _task(message)
    models = _models(message, context)
    if task.get("metrics"):
        return Message(RecordDict({"metrics": MetricRecord(dict(node.metrics(models[0])))}), reply_to=message)
    measures: dict[str, Measure] = {}
    for split, places in get_questions(task, len(models)).items():
        found = node.measure([models[i] for i in places], split, split == task.get("tempered")) or []  # type: ignore[arg-type]
        measures |= {f"{split}-{i}": measure for i, measure in zip(places, found, strict=False)}
    content = RecordDict()
    put_measures(content, measures)
    if compare := task.get("compare"):
        put_outcomes(content, node.compare([models[i] for i in compare], _split(task)))
    return Message(content, reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Measure the model, decide, and train.

    The reply has the client's measure, and the trained model or the reason for declining. A priority client may get
    two models to train, of which the first is the round's.
    """
    node, task = _node(context), _task(message)
    models = _models(message, context)
    priority, broadcast = bool(task["priority"]), get_broadcast(task)
    measured = node.measure(models, _split(task))
    if measured is None:
        raise FedalignError(f"this client has no {task['split']} samples to measure the model on")
    own, policy, content = measured[0], Policy.read(context.node_config), RecordDict()
    put_measures(content, {"own": own})
    rule, run = node.settings.make_rule(), context.run_id
    answers = [policy.refuses(rule, one, broadcast, priority, run, len(models)) for one in measured]
    refusal = next((answer for answer in answers if answer is not None), None)
    if refusal is None:
        client, round, rounds = int(task["client"]), broadcast.round, int(task["rounds"])
        correction = get_correction(message.content, node.layout)
        trained = [node.train(model, client, round, rounds, correction) for model in models]
        put_updates(content, trained, models, node.packing)
    else:
        content["declined"] = ConfigRecord({"reason": refusal})
    for one in measured:
        policy.note(one, broadcast, refusal, run)
    return Message(content, reply_to=message)


def _models(message: Message, context: Context) -> list[torch.Tensor]:
    """Return the models of a message, some of which may be in this node's cache."""
    limit = Policy.read(context.node_config).cache_mb << 20
    return get_parcels(message.content, _node(context).packing, ModelCache(cache_folder(os.environ), limit))


def _task(message: Message) -> Mapping[str, Any]:
    task = message.content["task"]
    if not isinstance(task, ConfigRecord):
        raise FedalignError("the message has no task: is the server FedALIGN's?")
    return task


def _split(task: Mapping[str, Any]) -> Split:
    split: Split = task["split"]
    return split


def _node(context: Context) -> Node:
    """Return this client's node; its data and model are loaded once in a process."""
    return _made(json.dumps(for_node(context.run_config)), json.dumps(dict(context.node_config)))


@functools.lru_cache(maxsize=8)
def _made(run_config: str, node_config: str) -> Node:
    return Node(Settings.read(json.loads(run_config)), json.loads(node_config))
