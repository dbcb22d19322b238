"""The owner's policy in the SuperNode's own process: what it declines never becomes a task, so no app's code runs.

Flower's SuperNode fetches a message, then the run and the app's bundle that it belongs to, and then makes a task of
it. The gate stands between: it declines messages of nodes that opted out, and apps that the owner does not allow.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message

from fedalign.errors import FedalignError
from fedalign.flower.declining import decline
from fedalign.flower.guard import LOAD, PULL
from fedalign.flower.policy import Policy
from fedalign.flower.run_config import SERVER_CODE
from fedalign.flower.texts import plain_text

_FETCH = "_pull_and_store_message"  # Flower's function that fetches a message and makes a task of it
# package.module:Name has a colon, as in a text that is put together of several; an escape can hide one. A device may be
# cuda:0, and no name begins with a digit.
_CODE = re.compile(r"\\|:(?!\s*-?\d)")
_ON_THE_SERVER = {"roster", "out", "resume", "start", *SERVER_CODE}  # paths, and code that a node does not load


class _NotAllowedError(Exception):
    """Leaves Flower's function; its text is the reason."""


class Gate:
    """Stands in for Flower's function that fetches a message and makes a task of it.

    ``fetch`` is that function, ``store`` the one that stores a reply. Messages that the policy declines get a reply
    with the reason, and a line in the owner's log, as does every app that may run.
    """

    def __init__(self, policy: Policy, fetch: Callable[..., int | None], store: Callable[..., None]) -> None:
        self._policy, self._fetch, self._store = policy, fetch, store

    def __call__(
        self,
        *,
        receive: Callable[[], tuple[Message, Any] | None],
        get_run: Callable[[int], Any],
        get_fab: Callable[[str, int], Any],
        **options: Any,
    ) -> int | None:
        """Fetch a message, as Flower does; return its run, or None if there was no message."""
        received: list[Message] = []
        runs: dict[int, Any] = {}

        def checked_message() -> tuple[Message, Any] | None:
            found = receive()
            if found is not None:
                received.append(found[0])
                if self._policy.opt_out:
                    raise _NotAllowedError("opted out")
            return found

        def checked_run(number: int) -> Any:
            run = get_run(number)
            if run.primary_task_type == "flwr-agentapp":
                raise _NotAllowedError("this node runs no agents")
            runs[number] = run
            return run

        def checked_app(claimed: str, run: int) -> Any:
            bundle = get_fab(claimed, run)
            digest = hashlib.sha256(bundle.content).hexdigest()
            reason = self._policy.declines(digest)
            if reason is None and self._policy.allowed_apps:
                reason = foreign_code(dict(runs[run].override_config), _settings_of(bundle.content, runs[run]))
            if reason is not None:
                raise _NotAllowedError(reason)
            self._policy.node_log.add(run=run, asked="app", app=digest)
            return bundle

        try:
            return self._fetch(receive=checked_message, get_run=checked_run, get_fab=checked_app, **options)
        except _NotAllowedError as reason:
            (message,) = received
            run = int(message.metadata.run_id)
            self._policy.node_log.add(run=run, asked=message.metadata.message_type, trained=False, reason=str(reason))
            self._store(decline(message, str(reason)), options["state"], options["object_store"])
            return run


def foreign_code(changed: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return which setting of a run names code that the app's own settings do not name; None if there is none.

    A setting such as ``client-steps`` may name any function that is installed on the node, with arguments. Texts in
    which an escape or quotes could hide such a name count as code, too.

    >>> own = {"rule": "auto", "loss": "my_app.losses:squared"}
    >>> foreign_code({"rule": "fedalign", "loss": "my_app.losses:squared", "out": "/a:b"}, own)
    >>> foreign_code({"loss": "subprocess:run(args='ls')"}, own)
    "this node does not allow code that the app does not name: loss = subprocess:run(args='ls')"
    """
    for key, value in changed.items():
        if isinstance(value, str) and key not in _ON_THE_SERVER and _CODE.search(value) and value not in own.values():
            setting = f"{plain_text(key)} = {plain_text(value, 60)}"
            return f"this node does not allow code that the app does not name: {setting}"
    return None


def _settings_of(bundle: bytes, run: Any) -> Mapping[str, Any]:
    """Return the settings in an app's own pyproject.toml."""
    from flwr.common.config import get_fused_config_from_fab

    settings: Mapping[str, Any] = get_fused_config_from_fab(bundle, replace(run, override_config={}))
    return settings


def close_gate(policy: Policy) -> None:
    """Put the gate into Flower's SuperNode, in this process.

    Raises :class:`FedalignError` for a version of Flower without the place for it: a policy that cannot be enforced
    must not look as if it were.
    """
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.runtime import run_clientapp

    fetch, store = (getattr(loop, name, None) for name in (_FETCH, "_insert_message"))
    if fetch is None or store is None or not all(hasattr(run_clientapp, name) for name in (PULL, LOAD)):
        raise FedalignError("this version of flwr has no place to enforce a node's policy: install flwr 1.41 or 1.42")
    setattr(loop, _FETCH, Gate(policy, fetch, store))
