"""The setting ``trust``: whether a rule believes what free clients report, or priority clients verify their updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from fedalign.errors import FedalignError, nearest
from fedalign.rules.rule import Rule
from fedalign.rules.verified import Verified
from fedalign.settings.notation import parse
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of

_VERIFIABLE = ("fedalign", "autoalign")
_OF_THE_RULE = ("rule", "match_on")  # options of Verified that the verified rule brings


def verify(rule: Rule, options: Mapping[str, Any] | None = None) -> Rule:
    """Return a rule with ``trust="verify"``: verified, unless it is so already or admits nobody.

    ``options`` are those of :class:`Verified`; a rule that is verified already keeps its own. Raises
    :class:`FedalignError` for a rule that runs an algorithm of its own, which verified rounds would replace.

    >>> from fedalign import Align, PriorityOnly
    >>> verify(Align(0.3)).rule
    Align(epsilon=0.3, on='loss', match_on=None)
    >>> verify(PriorityOnly()).invites_free
    False
    """
    if isinstance(rule, Verified) or not rule.invites_free:
        return rule
    if rule.algorithm not in _VERIFIABLE:
        raise FedalignError(
            f"{type(rule).__name__} runs the algorithm {rule.algorithm!r}, which cannot be verified; use trust='report'"
        )
    return Verified(rule, **(options or {}))


def with_trust(rule: Rule, trust: str, **usual: Any) -> Rule:
    """Return a rule with a setting of trust applied to it.

    ``"report"`` leaves it as it is, so that it believes what free clients report. ``"verify"`` verifies it
    (:func:`verify`), and takes the options of :class:`Verified`: ``"verify(within=4.0)"``. ``usual`` are options for
    a rule that is verified here, which ``trust`` may set otherwise. Raises :class:`FedalignError` for another value.

    >>> from fedalign import Align
    >>> with_trust(Align(0.3), "report")
    Align(epsilon=0.3, on='loss', match_on=None)
    >>> with_trust(Align(0.3), "verify(within=4.0)").within
    4.0
    """
    options = read_trust(trust)
    return rule if options is None else verify(rule, {**usual, **options})


def read_trust(trust: str) -> dict[str, Any] | None:
    """Check a setting of trust, and return the options for :class:`Verified`; None: believe what clients report.

    >>> read_trust("verify(within=4)"), read_trust("report")
    ({'within': 4.0}, None)
    >>> read_trust("verify(widthin=4)")
    Traceback (most recent call last):
    fedalign.errors.FedalignError: trust has no option 'widthin'; did you mean 'within'?
    """
    name, given = parse(trust) if isinstance(trust, str) else (None, {})
    if name not in ("report", "verify") or (given and name == "report"):
        raise FedalignError(
            f"trust is {trust!r}; choose 'report' or 'verify', which may have options: verify(within=4.0)"
        )
    known = _options()
    for key in given:
        if key not in known:
            raise FedalignError(f"trust has no option {key!r}; {nearest(key, sorted(known))}")
    options = {key: check_type(f"trust.{key}", value, known[key]) for key, value in given.items()}
    Verified(**options)
    return options if name == "verify" else None


@cache
def _options() -> dict[str, Any]:
    return {key: one.annotation for key, one in options_of(Verified).items() if key not in _OF_THE_RULE}
