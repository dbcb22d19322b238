"""Which clients are priority clients: named, or with one flag for each client."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedalign.errors import FedalignError, nearest


def priority_flags(priority: Sequence[bool] | Sequence[str] | str, names: Sequence[str]) -> list[bool]:
    """Return for each client whether it is a priority client.

    ``priority`` holds names, in which ``*`` stands for any text, or one flag for each client. Raises
    :class:`FedalignError` for a name that no client has, and for another number of flags.

    >>> priority_flags(["site-*"], ["site-1", "site-2", "phone"])
    [True, True, False]
    >>> priority_flags("site-3", ["site-1", "site-2"])
    Traceback (most recent call last):
    fedalign.errors.FedalignError: priority names 'site-3', which is no client; did you mean 'site-2'?
    """
    wanted = [priority] if isinstance(priority, str) else list(priority)
    if all(isinstance(one, str) for one in wanted):
        for name in map(str, wanted):
            if not any(_is_meant(name, client) for client in names):
                raise FedalignError(f"priority names {name!r}, which is no client; {nearest(name, names)}")
        return [any(_is_meant(str(name), client) for name in wanted) for client in names]
    if len(wanted) != len(names):
        raise FedalignError(f"{len(wanted)} priority flags for {len(names)} clients; there must be one per client")
    return [bool(flag) for flag in wanted]


def _is_meant(name: str, client: str) -> bool:
    return name == client or ("*" in name and fnmatchcase(client, name))
