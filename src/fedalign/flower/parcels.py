"""Models in messages: packed, or named by their hash where the receiver has them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedalign.errors import FedalignError
from fedalign.flower.model_cache import ModelCache, digest, is_digest
from fedalign.flower.packing import Packing
from fedalign.flower.wire import get_models, put_models

_COUNT = struct.Struct("<Q")
MISSING = "missing"  #: the record of a reply from a node that has lost a model


class MissingModelError(Exception):
    """Raised when a message names a model, or a base of one, that this node does not have."""


@dataclass(frozen=True)
class Parcel:
    """A model of a message, by its digest. ``data`` is None where the receiver has it.

    ``base`` is the digest of the model that it is packed against, ``rounded`` whether in the 16-bit format.
    """

    name: str
    base: str = ""
    rounded: bool = False
    data: bytes | None = None


def put_parcels(content: RecordDict, parcels: Sequence[Parcel]) -> None:
    """Put models into a message to a client."""
    sent = [parcel.data for parcel in parcels if parcel.data is not None]
    if sent:
        _put_packed(content, sent)
    content["models"] = ConfigRecord(
        {
            "names": [parcel.name for parcel in parcels],
            "bases": [parcel.base for parcel in parcels],
            "rounded": [parcel.rounded for parcel in parcels],
            "sent": [parcel.data is not None for parcel in parcels],
        }
    )


def get_parcels(content: RecordDict, packing: Packing, cache: ModelCache) -> list[torch.Tensor]:
    """Return the models of a message on the client, from the message, the cache or the initial model.

    Raises :class:`MissingModelError` if a model is named that is in neither, and :class:`FedalignError` if a message is
    damaged, or names a model by something else than a digest. All models are in the cache afterwards.
    """
    record = content.get("models")
    if not isinstance(record, ConfigRecord):
        return list(get_models(content, len(packing.initial), packing.initial.dtype))
    names, bases, rounded, sent = (_list(record, key) for key in ("names", "bases", "rounded", "sent"))
    for name in [*names, *filter(None, bases)]:
        if not isinstance(name, str) or not is_digest(name):  # it must not become a path on this node
            raise FedalignError("the server's message names a model by something else than its SHA-256")
    parts = iter(_get_packed(content, sum(map(bool, sent))))
    exact = replace(packing, transport="exact")
    here: dict[str, torch.Tensor] = {}

    def find(name: str) -> torch.Tensor:
        found = here.get(name)
        if found is None:
            found = cache.get(name, packing.initial.dtype)
        if found is None and digest(packing.initial) == name:
            found = packing.initial
        if found is None or len(found) != len(packing.initial):
            raise MissingModelError(name)
        return found

    for name, base, is_rounded, is_sent in zip(names, bases, rounded, sent, strict=True):
        if not is_sent:
            here[str(name)] = find(str(name))
            continue
        against = find(str(base)) if base else None
        model = (packing if is_rounded else exact).unpack(next(parts), against)
        if digest(model) != name:
            raise FedalignError("a model of the message is damaged: it has another hash")
        here[str(name)] = model
        cache.put(str(name), model)
    return [here[str(name)] for name in names]


def put_updates(
    content: RecordDict, models: Sequence[torch.Tensor], received: Sequence[torch.Tensor], packing: Packing
) -> None:
    """Put what a client trained into its reply, packed against the models that it received."""
    if packing.is_plain:
        put_models(content, models)
    else:
        pairs = zip(models, received, strict=True)
        _put_packed(content, [packing.pack(model.cpu(), base) for model, base in pairs])


def get_updates(content: RecordDict, received: Sequence[torch.Tensor], packing: Packing) -> list[torch.Tensor]:
    """Return what a client trained on the server, packed or as plain arrays; one model for each that it received.

    Raises :class:`FedalignError` for anything else: a stranger wrote it.
    """
    record, size = content.get("model"), len(packing.initial)
    if isinstance(record, ArrayRecord) and list(record) == ["packed"]:
        parts = _get_packed(content, len(received))
        return [packing.unpack(part, base) for part, base in zip(parts, received, strict=True)]
    models = list(get_models(content, size, packing.initial.dtype))
    if len(models) != len(received):
        raise FedalignError(f"it sent {len(models)} models, not {'one' if len(received) == 1 else len(received)}")
    return models


def _list(record: ConfigRecord, key: str) -> list[object]:
    value = record.get(key)
    if not isinstance(value, list):
        raise FedalignError("the server's message names no models: is it of another version?")
    return list(value)


def _put_packed(content: RecordDict, parts: Sequence[bytes]) -> None:
    """Put byte strings into a message as one array, which is faster than several."""
    data = b"".join([*(_COUNT.pack(len(part)) for part in parts), *parts])
    content["model"] = ArrayRecord({"packed": Array("uint8", (len(data),), "fedalign.packed", data)})


def _get_packed(content: RecordDict, count: int) -> list[memoryview]:
    """Return so many byte strings of a message; they are views, so that nothing is copied."""
    record = content.get("model")
    if count == 0:
        return []
    if not isinstance(record, ArrayRecord) or list(record) != ["packed"]:
        raise FedalignError("it sent no model")
    data, parts, at = memoryview(record["packed"].data), [], _COUNT.size * count
    if len(data) < at:
        raise FedalignError(f"its model ends after {len(data)} bytes")
    for (length,) in _COUNT.iter_unpack(data[:at]):
        parts.append(data[at : at + length])
        at += length
    if at != len(data):
        raise FedalignError(f"it sent {len(data)} bytes of models in place of {at}")
    return parts
