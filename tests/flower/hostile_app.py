"""A ClientApp whose nodes are hostile if their node config names attacks; all other nodes are honest.

``attacks`` holds registry texts, separated by ``;``, ``classes`` is the number of the task's classes, and ``samples``
multiplies the sample count that a hostile node claims. It claims the broadcast's loss as its own, and knows no update
but its own.
"""

import os
from dataclasses import replace

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Scene
from fedalign.attacks.hostile import claimed_measure, claimed_samples, crafted_models, poisoned
from fedalign.flower import client_app
from fedalign.flower.model_cache import ModelCache, cache_folder
from fedalign.flower.node import ClientData, Node
from fedalign.flower.parcels import get_parcels
from fedalign.flower.settings import Settings, function
from fedalign.flower.wire import HELLO, TRAIN, get_broadcast, put_measures, put_model


def adversary(node_config):
    return Adversary(node_config["attacks"].split(";"), samples=node_config.get("samples", 1.0), knows="own")


def poisoned_data(node_config):
    """Return what a hostile node trains on and measures with, as a simulation poisons it."""
    honest = function(node_config["honest-data"])(node_config)
    who = node_config["classes"], node_config["seed"], node_config["client"]
    parts = {s: getattr(honest, s) for s in ("train", "heldout", "test")}
    return ClientData(**{s: poisoned(adversary(node_config), xy, s, *who) for s, xy in parts.items()})


class HostileApp(ClientApp):
    """Answers as the attacks of the node config say."""

    def __call__(self, message, context):
        kind = message.metadata.message_type
        if "attacks" not in context.node_config or kind not in (HELLO, TRAIN):
            return client_app.app(message, context)
        if kind == HELLO:
            reply = client_app.app(message, context)
            honest = reply.content["samples"]["train"]
            reply.content["samples"]["train"] = claimed_samples(adversary(context.node_config), honest)
            return reply
        return client_app.ask_again(message, context, self._train)

    def _train(self, message, context):
        task, settings = message.content["task"], Settings.read(context.run_config)
        client, sent = int(task["client"]), get_broadcast(task)
        own_config = {"honest-data": settings.data, "seed": settings.seed, "client": client}
        settings = replace(settings, data=f"{__name__}:poisoned_data")
        node = Node(settings, {**context.node_config, **own_config})
        (received,) = get_parcels(message.content, node.packing, ModelCache(cache_folder(os.environ), limit=1 << 20))
        (own,) = node.measure([received], task["split"])
        trained = node.train(received, client, sent.round, int(task["rounds"]))
        scene = Scene(settings.seed, sent.round, int(task["rounds"]))
        hostile, size = adversary(context.node_config), node.layout.trainable_size
        content = RecordDict()
        put_measures(content, {"own": claimed_measure(hostile, own, sent)})
        put_model(content, crafted_models(hostile, {client: trained}, received, size, scene)[client])
        return Message(content, reply_to=message)


app = HostileApp()
