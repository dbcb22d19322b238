"""Checks what a node sent, before any other code sees it.

A node's reply is a stranger's. Everything below holds whatever it contains: a reply becomes either a plain copy, with
the expected records alone, exact types and limited sizes, or :class:`Unreadable` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedalign.errors import FedalignError
from fedalign.flower.declining import DECLINED, NotWilling
from fedalign.flower.texts import plain_text
from fedalign.flower.wire import ACCOUNT, HELLO, KEEP, MEASURE, PERSONAL, TRAIN
from fedalign.protocol.messages import Lost

#: The records that a reply to each kind of message may have, with their types. A reply with another one is refused.
RECORDS: Mapping[str, Mapping[str, type]] = {
    HELLO: {"samples": MetricRecord, "wishes": ConfigRecord, "data": ConfigRecord},
    KEEP: {},
    PERSONAL: {"personal": MetricRecord},
    ACCOUNT: {},
    MEASURE: {"measures": MetricRecord, "outcomes": MetricRecord, "metrics": MetricRecord, "missing": ConfigRecord},
    TRAIN: {"measures": MetricRecord, "model": ArrayRecord, "declined": ConfigRecord, "missing": ConfigRecord},
}
MOST_VALUES = 10_000  #: in the records of a reply, the elements of lists included
WORDS = 1 << 20  #: bytes of a reply besides its arrays
_LONGEST_NAME = 200
_LARGEST_INT = 1 << 64


class Unreadable(Lost):
    """A reply came, and failed the checks; ``reason`` says why. The server refuses it."""


class Unanswered(Lost):
    """The SuperLink says that no reply comes: the node's time is over, or it is gone."""


def read_reply(reply: Message, kind: str, limit: float, largest: int) -> RecordDict | Lost:
    """Return the checked content of a reply to a message of a kind, or why there is none; raises nothing.

    ``limit`` is the number of seconds that the node had. ``largest`` limits the bytes of the reply's arrays.
    """
    try:
        if reply.has_error():
            return _failure(reply.error.code, reply.error.reason, limit)
        return checked(reply.content, kind, largest)
    except FedalignError as error:
        return Unreadable(plain_text(str(error)))
    except Exception as error:  # a stranger's objects may raise anything
        return unreadable(error)


def unreadable(error: BaseException) -> Unreadable:
    """Return the refusal of a reply that made the reader raise an exception.

    >>> unreadable(KeyError("model"))
    Unreadable(reason='its reply cannot be read (KeyError)')
    """
    return Unreadable(f"its reply cannot be read ({plain_text(type(error).__name__, 60)})")


def checked(content: RecordDict, kind: str, largest: int) -> RecordDict:
    """Return a plain copy of the records of a reply to a message of a kind.

    Raises :class:`FedalignError` for an unexpected record, a value of an unexpected type, a name that is too long or
    has control characters, too many values, and arrays of more than ``largest`` bytes in total.

    >>> checked(RecordDict({"samples": MetricRecord({"train": 50})}), HELLO, largest=0)["samples"]["train"]
    50
    >>> checked(RecordDict({"weights": MetricRecord({"train": 50})}), HELLO, largest=0)
    Traceback (most recent call last):
    ...
    fedalign.errors.FedalignError: its reply has an unexpected record 'weights'
    """
    if not isinstance(content, RecordDict):
        raise FedalignError(f"its reply is of type {_kind(content)}, not RecordDict")
    expected = RECORDS[kind]
    if len(content) > len(expected):
        raise FedalignError(f"its reply has {len(content)} records; at most {len(expected)} are expected")
    copy, left = RecordDict(), _Budget(MOST_VALUES, WORDS, largest)
    for name in list(content):
        wanted: Any = expected.get(name) if type(name) is str else None
        if wanted is None:
            raise FedalignError(f"its reply has an unexpected record {_quoted(name)}")
        record: Any = content[name]
        if not isinstance(record, wanted):
            raise FedalignError(f"its record {name!r} is of type {_kind(record)}, not {wanted.__name__}")
        left.values -= len(record)  # before the record is gone through
        left.check()
        read = {ArrayRecord: left.array, MetricRecord: left.numbers, ConfigRecord: left.value}[wanted]
        copy[name] = wanted({left.name(key): read(record[key]) for key in list(record)})
    return copy


class _Budget:
    """What a reply may still contain."""

    def __init__(self, values: int, words: int, arrays: int) -> None:
        self.values, self.words, self.arrays, self._largest = values, words, arrays, arrays

    def check(self) -> None:
        if self.values < 0:
            raise FedalignError(f"its reply has more than {MOST_VALUES} values")
        if self.words < 0:
            raise FedalignError(f"the values of its reply have more than {WORDS} bytes")
        if self.arrays < 0:
            raise FedalignError(f"the arrays of its reply have more than {self._largest} bytes")

    def name(self, name: object) -> str:
        if type(name) is not str or len(name) > _LONGEST_NAME or plain_text(name, _LONGEST_NAME) != name:
            raise FedalignError(f"its reply has a value with the name {_quoted(name)}")
        return name

    def numbers(self, value: object) -> Any:
        """Check a number, or a list of numbers."""
        for one in value if type(value) is list else [value]:
            if type(one) is not int and type(one) is not float:
                raise FedalignError(f"its reply has a value of type {_kind(one)}, not a number")
        return self.value(value)

    def value(self, value: object) -> Any:
        """Check a number, a text, bytes, or a list of those."""
        if type(value) is list:
            self.values -= len(value)
            self.check()
            return [self._scalar(one) for one in value]
        return self._scalar(value)

    def _scalar(self, value: object) -> Any:
        if type(value) is str or type(value) is bytes:
            self.words -= len(value)
            self.check()
        elif type(value) is int:
            if not -_LARGEST_INT < value < _LARGEST_INT:
                raise FedalignError("its reply has a whole number of more than 64 bits")
        elif type(value) is not float and type(value) is not bool:
            raise FedalignError(f"its reply has a value of type {_kind(value)}")
        return value

    def array(self, array: object) -> Array:
        """Check what is said of an array. Its bytes are read later, against the shape and type that are expected."""
        if not isinstance(array, Array):
            raise FedalignError(f"its reply has an array of type {_kind(array)}")
        dtype, shape, kind, data = array.dtype, array.shape, array.stype, array.data
        if type(dtype) is not str or type(kind) is not str or type(data) is not bytes:
            raise FedalignError("its reply has an array that cannot be read")
        if not isinstance(shape, tuple | list) or len(shape) > 8 or any(type(length) is not int for length in shape):
            raise FedalignError("its reply has an array whose shape cannot be read")
        self.words -= len(dtype) + len(kind)
        self.arrays -= len(data)
        self.check()
        return Array(dtype, tuple(shape), kind, data)


def _failure(code: object, reason: object, limit: float) -> Lost:
    """Say in words what an error reply means: the SuperLink or the node sent it in place of an answer."""
    if code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        return Unanswered(f"no answer in {limit:g} s")
    if code == ErrorCode.NODE_UNAVAILABLE:
        return Unanswered("its node has stopped answering")
    lines = reason[-10_000:].strip().splitlines() if type(reason) is str else []
    if code == DECLINED:
        return NotWilling(plain_text(lines[-1] if lines else "no reason given"))
    number = code if type(code) is int and abs(code) < _LARGEST_INT else _kind(code)
    return Lost(f"error {number}: {plain_text(lines[-1] if lines else 'no reason given')}")


def _kind(value: object) -> str:
    return plain_text(type(value).__name__, 60)


def _quoted(name: object) -> str:
    return repr(plain_text(name, 40))
