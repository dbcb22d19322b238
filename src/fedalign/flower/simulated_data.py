"""The data that a client has in a simulated experiment, for a node that takes its part."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments.federations import federation_of
from fedalign.flower.node import ClientData
from fedalign.registry import DATA
from fedalign.rules.rule import Split


def client_data(table: Mapping[str, Any], seed: int, client: int) -> ClientData:
    """Return a client's data, given the section ``[data]`` of an experiment, a seed and the client's number from 0.

    Raises :class:`FedalignError` if the experiment has no such client.

    >>> data = client_data({"kind": "synth", "priority": 1, "free": 1, "samples": 50}, seed=0, client=0)
    >>> len(data.train[0]), len(data.heldout[0])
    (40, 10)
    """
    federation = _made(json.dumps(dict(table)), seed)
    if not 0 <= client < len(federation.clients):
        raise FedalignError(
            f"partition-id is {client}, but the experiment has clients 0 to {len(federation.clients) - 1}"
        )
    rows, pool = federation.clients[client].rows, federation.pool
    splits: tuple[Split, ...] = ("train", "heldout", "test")
    train, heldout, test = ((pool.x[rows(split)], pool.y[rows(split)]) for split in splits)
    return ClientData(
        train,
        heldout if len(heldout[0]) else None,
        test if len(test[0]) else None,
        heldout_fraction=0.0,
        mean=pool.mean,
        std=pool.std,
    )


@functools.lru_cache(maxsize=2)
def _made(table: str, seed: int) -> Federation:
    settings = json.loads(table)
    return federation_of(DATA.make(DATA.resolve("data", settings)), seed, settings["kind"])
