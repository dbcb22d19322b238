"""Replies that a hostile node might send: an honest reply, changed in one of many ways. Used to test a server.

``MALFORMED`` have to be refused. ``VALUES`` are well-formed lies, which a rule or the server's checks judge.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

Change = Callable[[Message, Message, random.Random], Any]
SIZE = 610  #: numbers of the model that the replies are about
ODD_TEXTS = ("\x1b[2J\x1b[1;31mowned", "line\nERROR forged", "\u202etxet", "\ud800", "x" * 100_000, "\x00", "")
ODD_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e308, -1e308, 2**63, 2**64 - 1, -(2**63), 0)


def hostile_reply(reply: Message, message: Message, draw: random.Random) -> tuple[str, Any]:
    """Return the name of a change and the changed reply; ``reply`` answers ``message`` honestly.

    What comes back may be no message at all. A name that begins with ``lie`` is a well-formed reply with other values.
    """
    changes = {**MALFORMED, **VALUES}
    name = draw.choice(sorted(changes))
    copy = Message(RecordDict(dict(reply.content)), reply_to=message)
    return name, changes[name](copy, message, draw)


def _array(reply: Message, draw: random.Random, change: Callable[[bytes], bytes], packed: bool) -> Message:
    """Replace the bytes of a reply's model, or give a model to a reply without one.

    With ``packed`` they stay in the format of the honest reply, else they are those of a plain array.
    """
    record: Any = reply.content.get("model")
    name, data = "flat", saved(np.zeros(SIZE, np.float32))
    if packed and isinstance(record, ArrayRecord):
        name = next(iter(record))
        data = record[name].data
    reply.content["model"] = ArrayRecord({name: Array("float32", (7,), "numpy.ndarray", change(data))})
    return reply


def _numbers(reply: Message) -> str:
    """Return the name of the reply's record of numbers."""
    return next((name for name, record in reply.content.items() if isinstance(record, MetricRecord)), "measures")


def _with_numbers(reply: Message, change: Callable[[str, Any], Any]) -> Message:
    name = _numbers(reply)
    old: Any = reply.content.get(name, {})
    reply.content[name] = forced(MetricRecord(), {key: change(key, value) for key, value in old.items()})
    return reply


def forced(record: Any, values: dict[Any, Any]) -> Any:
    """Fill a record with values that it would not accept."""
    record.__dict__["_data"] = values
    return record


def saved(array: np.ndarray[Any, Any], save: Callable[..., None] = np.save) -> bytes:
    """Return an array as a ``.npy`` file, or with ``np.savez`` as a ``.npz`` file."""
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def header(shape: str, rest: bytes = b"", kind: str = "<f4") -> bytes:
    """Return a ``.npy`` file whose header claims a shape and a type."""
    words = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words + rest


class Raising(RecordDict):
    """Records that raise whenever anybody looks at them."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no \x1b[2J access")

    def __len__(self) -> int:
        raise RecursionError

    def __iter__(self) -> Any:
        raise MemoryError


def _raising(reply: Message, message: Message, draw: random.Random) -> Message:
    reply.__dict__["_content"] = Raising.__new__(Raising)
    return reply


def _replaced(name: str, make: Callable[[random.Random], Any]) -> Change:
    def change(reply: Message, message: Message, draw: random.Random) -> Message:
        reply.content.__dict__["_data"][name] = make(draw)
        return reply

    return change


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Change:
    return lambda reply, message, draw: _array(reply, draw, lambda data: change(data, draw), draw.random() < 0.5)


def _other_dtype(data: bytes, draw: random.Random) -> bytes:
    kind = draw.choice(["<f8", ">f4", "<i4", "<c8", "|S4", "<M8[s]", "|O", "<f2"])
    return header(f"({SIZE},)", bytes(4 * SIZE), kind)


def _field_names(data: bytes, draw: random.Random) -> bytes:
    words = f"{{'descr': [({draw.choice(ODD_TEXTS[:3])!r}, '<f4')], 'fortran_order': False, 'shape': (1,), }}\n"
    return b"\x93NUMPY\x01\x00" + len(words.encode()).to_bytes(2, "little") + words.encode() + bytes(4)


def _records(reply: Message, message: Message, draw: random.Random) -> Message:
    text, record = draw.choice(ODD_TEXTS)[:500], MetricRecord({"x": 1.0})
    reply.content.__dict__["_data"].update({f"{text}{i}": record for i in range(draw.choice([1, 50, 5000]))})
    return reply


def _keys(reply: Message, message: Message, draw: random.Random) -> Message:
    many = {f"extra-{i}": 0.5 for i in range(20_000)}
    old: Any = reply.content.get(_numbers(reply), {})
    reply.content[_numbers(reply)] = forced(MetricRecord(), {**many, **old})
    return reply


def _error(reply: Message, message: Message, draw: random.Random) -> Message:
    return Message(Error(draw.choice([-1, 0, 2, 99, 2**40]), draw.choice(ODD_TEXTS)), reply_to=message)


def _declined(reply: Message, message: Message, draw: random.Random) -> Message:
    reply.content["declined"] = forced(ConfigRecord(), {"reason": draw.choice([*ODD_TEXTS, 7, b"\xff", ["a"], None])})
    reply.content.__dict__["_data"].pop("measures", None)
    return reply


def _lie(reply: Message, message: Message, draw: random.Random) -> Message:
    return _with_numbers(reply, lambda key, value: draw.choice(ODD_NUMBERS) if draw.random() < 0.5 else value)


def _flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 10, 1000])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


MALFORMED: dict[str, Change] = {
    "an .npz file": _bytes(lambda data, draw: saved(np.zeros(SIZE, np.float32), np.savez)),
    "a header that claims 36 TiB": _bytes(lambda data, draw: header("(9895604649984,)", bytes(64))),
    "a header that claims more models": _bytes(lambda data, draw: header(f"(10000000000, {SIZE})", bytes(4 * SIZE))),
    "a cut header": _bytes(lambda data, draw: data[: draw.randrange(1, 80)]),
    "cut data": _bytes(lambda data, draw: data[: -draw.randrange(1, len(data) - 80)] if len(data) > 100 else b""),
    "more data": _bytes(lambda data, draw: data + draw.randbytes(draw.choice([1, 4, 4096]))),
    "no data": _bytes(lambda data, draw: b""),
    "random data": _bytes(lambda data, draw: draw.randbytes(draw.randrange(3000))),
    "far too much data": _bytes(lambda data, draw: data + bytes(1 << 21)),
    "nested brackets": _bytes(lambda data, draw: header("(" * 9000)),
    "a pickle": _bytes(lambda data, draw: header("(1,)", b"cos\nsystem\n(S'true'\ntR.", "|O")),
    "another dtype": _bytes(_other_dtype),
    "names of fields": _bytes(_field_names),
    "another shape": _bytes(lambda data, draw: saved(np.zeros(draw.choice([0, 1, SIZE - 1, SIZE + 1]), np.float32))),
    "several models": _bytes(lambda data, draw: saved(np.zeros((3, SIZE), np.float32))),
    "a scalar": _bytes(lambda data, draw: saved(np.array(3.0, np.float32))),
    "another array": _replaced("model", lambda draw: ArrayRecord({"x": Array(np.zeros(SIZE, np.float32))})),
    "a thousand arrays": _replaced(
        "model", lambda draw: forced(ArrayRecord(), dict.fromkeys(map(str, range(1000)), Array(np.zeros(1))))
    ),
    "an array of objects": _replaced("model", lambda draw: forced(ArrayRecord(), {"flat": object()})),
    "numbers for the model": _replaced("model", lambda draw: MetricRecord({"flat": 1.0})),
    "no records": _replaced("measures", lambda draw: None),
    "objects for numbers": lambda reply, message, draw: _with_numbers(reply, lambda key, value: object()),
    "lists for numbers": lambda reply, message, draw: _with_numbers(reply, lambda key, value: [value]),
    "texts for numbers": lambda reply, message, draw: _with_numbers(reply, lambda key, value: draw.choice(ODD_TEXTS)),
    "huge integers": lambda reply, message, draw: _with_numbers(reply, lambda key, value: 10**400),
    "no numbers": lambda reply, message, draw: _with_numbers(reply, lambda key, value: None),
    "unexpected records": _records,
    "thousands of keys": _keys,
    "records that raise": _raising,
    "an error": _error,
    "a decline without a measure": _declined,
    "no message": lambda reply, message, draw: draw.choice([object(), 7, "text", json]),
    "no content": lambda reply, message, draw: Message(RecordDict(), reply_to=message),
}
VALUES: dict[str, Change] = {
    "lie: odd numbers": _lie,
    "lie: bytes of the model": _bytes(_flipped),
    "lie: not finite": _bytes(lambda data, draw: saved(np.full(SIZE, np.nan, np.float32))),
}
