"""Reads the first answer of a client, which says how many samples it has in each split."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedalign.flower.replies import Unreadable
from fedalign.flower.wire import MOST_SAMPLES
from fedalign.protocol.messages import Lost, Refused


def read_fingerprint(answer: RecordDict) -> str:
    """Return the fingerprint of a client's data, which only shows whether the data is the same as before; or "".

    >>> read_fingerprint(RecordDict({"data": ConfigRecord({"fingerprint": "0123456789abcdef"})}))
    '0123456789abcdef'
    >>> read_fingerprint(RecordDict({"data": ConfigRecord({"fingerprint": "a stranger's text"})}))
    ''
    """
    record = answer.get("data")
    found = record.get("fingerprint") if isinstance(record, ConfigRecord) else None
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{16}", found) else ""


def read_hello(answer: RecordDict | Lost, needed: Iterable[str]) -> dict[str, int] | Lost | Refused:
    """Return a client's number of samples in each split, or why it takes no part.

    ``needed`` names the splits that it must have besides training samples. ``Refused`` is for an answer that
    makes no sense.

    >>> answer = RecordDict({"samples": MetricRecord({"train": 50, "heldout": 0})})
    >>> read_hello(answer, [])
    {'train': 50, 'heldout': 0, 'test': 0}
    >>> read_hello(answer, ["heldout"])
    Lost(reason='it has no heldout samples')
    """
    if isinstance(answer, Lost):
        return Refused(None, answer.reason) if isinstance(answer, Unreadable) else answer
    samples = answer.get("samples")
    if not isinstance(samples, MetricRecord):
        return Refused(None, "it did not report how many samples it has")
    counts: dict[str, int] = {}
    for split in ("train", "heldout", "test"):
        reported = samples.get(split, 0)
        if type(reported) is not int or not 0 <= reported <= MOST_SAMPLES:
            return Refused(None, f"the number of {split} samples that it reports is not possible")
        counts[split] = reported
    for split in ("train", *needed):
        if not counts[split]:
            return Lost(f"it has no {'training' if split == 'train' else split} samples")
    return counts
