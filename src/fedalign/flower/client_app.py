"""The ClientApp: it measures the model, decides whether to take part, trains, and sends an update or a decline."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedalign.errors import FedalignError
from fedalign.flower.node import Node
from fedalign.flower.policy import Policy
from fedalign.flower.settings import Settings
from fedalign.flower.wire import get_broadcast, get_model, get_models, put_measures, put_model, put_outcomes
from fedalign.rules.rule import Split

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Report how many samples this client has in each split."""
    content = RecordDict({"samples": MetricRecord(dict(_node(context).samples()))})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the models of a message on one or more splits; the reply has a measure for each model and split.

    A task that is ``paired`` has two models and one split; the reply says how often only one of the models is right.
    A task with ``metrics`` asks for those of the settings.
    """
    node, task = _node(context), _task(message)
    models = list(get_models(message.content, node.layout.size, node.layout.dtype))
    if task.get("paired"):
        compared = RecordDict()
        put_outcomes(compared, node.compare(models, _split(task)))
        return Message(compared, reply_to=message)
    if task.get("metrics"):
        return Message(RecordDict({"metrics": MetricRecord(dict(node.metrics(models[0])))}), reply_to=message)
    measures = {}
    for split in str(task["split"]).split("+"):
        for i, measure in enumerate(node.measure(models, split) or []):  # type: ignore[arg-type]
            measures[f"{split}-{i}"] = measure
    content = RecordDict()
    put_measures(content, measures)
    return Message(content, reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Measure the model, decide, and train.

    The reply has the client's measure, and the trained model or the reason for declining.
    """
    node, task, settings = _node(context), _task(message), Settings.read(context.run_config)
    model = get_model(message.content, node.layout.size, node.layout.dtype)
    priority, broadcast = bool(task["priority"]), get_broadcast(task)
    measured = node.measure([model], _split(task))
    if measured is None:
        raise FedalignError(f"this client has no {task['split']} samples to measure the model on")
    own, policy, content = measured[0], Policy.read(context.node_config), RecordDict()
    put_measures(content, {"own": own})
    refusal = policy.refuses(settings.make_rule(), own, broadcast, priority, context.run_id)
    if refusal is None:
        trained = node.train(model, int(task["client"]), broadcast.round, int(task["rounds"]))
        put_model(content, trained)
    else:
        content["declined"] = ConfigRecord({"reason": refusal})
    policy.note(own, broadcast, refusal, context.run_id)
    return Message(content, reply_to=message)


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
    return _made(json.dumps(dict(context.run_config)), json.dumps(dict(context.node_config)))


@functools.lru_cache(maxsize=8)
def _made(run_config: str, node_config: str) -> Node:
    return Node(Settings.read(json.loads(run_config)), json.loads(node_config))
