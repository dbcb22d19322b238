"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from fedalign.protocol.autoalign import autoalign
from fedalign.protocol.fedalign import fedalign
from fedalign.protocol.local_only import local_only
from fedalign.protocol.messages import Run, Snapshot
from fedalign.protocol.plan import Plan

ALGORITHMS: dict[str, Callable[[Plan, Snapshot], Run]] = {
    "fedalign": fedalign,
    "autoalign": autoalign,
    "local-only": local_only,
}
