"""The verified rule: its options, and what it takes over from the rule that it verifies."""

import math

import pytest

import fedalign as fa
from fedalign.registry import RULES
from fedalign.rules.trust import verify
from fedalign.rules.verified import Verified


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": Verified()}, "verifies another rule"),
        ({"rule": "all"}, "verifies another rule"),
        ({"length": 0}, "length must be a number above 0, not 0"),
        ({"each": 0}, "each must be a number above 0, not 0"),
        ({"within": -1.0}, "within must be a number above 0, not -1.0"),
        ({"total": math.nan}, "total must be a number above 0, not nan"),
        ({"total": True}, "total must be a number above 0, not True"),
        ({"tolerance": -0.1}, "tolerance must be a finite number, 0 or more, not -0.1"),
        ({"tolerance": math.inf}, "tolerance must be a finite number, 0 or more, not inf"),
        ({"tolerance": "2 %"}, "tolerance must be a finite number, 0 or more, not '2 %'"),
        ({"cosine": 1.5}, "cosine must be from -1 to 1, not 1.5"),
        ({"cosine": "0.1"}, "cosine must be from -1 to 1, not '0.1'"),
        ({"cosine": math.nan}, "cosine must be from -1 to 1, not nan"),
        ({"probes": 0}, "probes must be a whole number of at least 1, not 0"),
        ({"probes": 2.5}, "probes must be a whole number of at least 1, not 2.5"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(fa.FedalignError, match=message):
        Verified(**options)


@pytest.mark.parametrize(
    "inner",
    [
        fa.Align(0.3),
        fa.Align(0.3, on="accuracy", match_on="train"),
        fa.AutoAlign(ladder=(0, 0.2, 1)),
        fa.TrustWeighted(),
        fa.LossWeighted(),
        fa.GradientAlign(),
    ],
)
def test_it_proposes_what_the_inner_rule_admits(inner):
    rule = Verified(inner)
    sent = fa.Broadcast(round=0, loss=1.0, accuracy=0.5, epsilon=rule.epsilon_at(0, 10))
    offers = {
        k: fa.Offer(fa.Measure(loss, 0.4, 5), fa.Similarity(cosine, 2.0))
        for k, loss, cosine in ((3, 1.1, 0.5), (4, 5.0, -0.5), (5, 0.9, 0.1))
    }
    assert rule.select(offers, sent) == inner.select(offers, sent)
    assert [rule.offers(o.measure, sent) for o in offers.values()] == [
        inner.offers(o.measure, sent) for o in offers.values()
    ]
    assert rule.epsilon_at(0, 10) == inner.epsilon_at(0, 10)
    assert (rule.match_on, rule.needs_accuracy, rule.needs_updates) == (inner.match_on, inner.needs_accuracy, True)


def test_its_own_match_on_goes_first():
    assert Verified(fa.Align(0.3, match_on="train"), match_on="heldout").match_on == "heldout"


def test_verify_leaves_what_needs_no_verification():
    assert isinstance(verify(fa.Everyone()), Verified)
    for rule in (fa.PriorityOnly(), Verified(length=3.0)):
        assert verify(rule) is rule


def test_it_has_a_name():
    rule = RULES.accept("rule", "fedalign-verified(length=1.5, probes=8)")
    assert isinstance(rule, Verified)
    assert (rule.length, rule.probes) == (1.5, 8)
