"""Keeps rules and names of version 0.1 working, with a warning that says what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.rules.rule import Broadcast, Offer, Rule, Selection

_OLD = ("compare", "candidates", "admits")


def adopt(rule: type[Rule]) -> None:
    """Let a rule class decide by its ``admits``, ``candidates`` or ``compare`` of version 0.1, and warn.

    In subclasses of ``Align`` and ``AutoAlign`` some of these names belong to this version; nothing changes for them.
    """
    from fedalign.rules.rule import Rule

    found = next((name for name in _OLD if name in vars(rule)), None)
    if found is None or "select" in vars(rule) or rule.algorithm != Rule.algorithm:
        return
    if rule.select is not Rule.select:
        if any(hasattr(parent, found) for parent in rule.__bases__):
            return
        rule.select = Rule.select  # type: ignore[method-assign]
    warnings.warn(
        f"{rule.__name__}.{found} is the interface of version 0.1; define select(offers, broadcast) instead",
        DeprecationWarning,
        stacklevel=4,
    )


def check(rule: Rule) -> None:
    """Refuse a rule that cannot decide anything, or whose methods of version 0.1 nobody would call."""
    from fedalign.rules.rule import Rule

    unused = next((name for name in ("compare", "base") if rule.algorithm == "autoalign" and hasattr(rule, name)), None)
    if unused is not None:
        now = {"compare": "candidates", "base": "training_set"}[unused]
        raise FedalignError(
            f"{type(rule).__name__}.{unused} is the interface of version 0.1; define {now}(offers, broadcast) instead"
        )
    if type(rule).select is Rule.select and not any(hasattr(rule, name) for name in _OLD):
        raise FedalignError(
            f"{type(rule).__name__} defines no select(offers, broadcast); "
            "define it to say which clients the server admits"
        )


def select(rule: Rule, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
    """Call the rule's 0.1 method and return its result as a Selection."""
    from fedalign.rules.rule import Selection

    old: Any = rule
    measures = {k: offer.measure for k, offer in offers.items()}
    if rule.needs_updates and hasattr(old, "compare"):
        found = old.compare(measures, {k: offer.similarity for k, offer in offers.items()}, broadcast)
    elif hasattr(old, "candidates"):
        found = old.candidates(measures, broadcast)
    else:
        check(rule)
        return Selection(tuple(k for k, own in measures.items() if old.admits(own, broadcast)))
    if len(found) != 1:
        raise FedalignError(
            f"{type(rule).__name__} gave {len(found)} candidates; to choose among several, subclass AutoAlign"
        )
    return found[0]  # type: ignore[no-any-return]


def candidate(epsilon: float | None, clients: tuple[int, ...], *others: Any, **more: Any) -> Selection:
    """Make a :class:`~fedalign.Selection`, under the name and with the arguments that it had in version 0.1."""
    from fedalign.rules.rule import Selection

    warnings.warn("fedalign.Candidate is called fedalign.Selection now", DeprecationWarning, stacklevel=2)
    named = dict(zip(("weight", "scale", "step", "reasons"), others, strict=False))
    return Selection(tuple(clients), epsilon=epsilon, **named, **more)
