"""How much clients' updates are alike, against the same by hand."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalign.aggregation.resemblance import resemblances
from fedalign.protocol.messages import Mix

SHARES = {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.2, 4: 0.2}


def models(seed, size=40):
    return dict(enumerate(torch.randn(5, size, generator=torch.Generator().manual_seed(seed))))


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def test_cosines_are_those_of_updates_less_the_mean_of_all():
    given, received = models(0), torch.randn(40, generator=torch.Generator().manual_seed(9))
    found = resemblances(Mix(SHARES, anchor=(0, 1)), given, received, size=30)
    mean = sum(given.values())[:30] / 5
    assert list(found) == list(combinations(range(5), 2))
    for (i, j), value in found.items():
        assert value == pytest.approx(cosine(given[i][:30] - mean, given[j][:30] - mean), abs=1e-6)


def test_updates_are_bounded_first_so_that_a_spike_hides_nothing():
    """Two of eight send one direction; one hides it behind a spike that the bounds would take away."""
    given = {k: torch.randn(400, generator=torch.Generator().manual_seed(k)) for k in range(7)}
    given[7] = given[6].clone()
    given[7][7] = 1e6
    shares, received = dict.fromkeys(range(8), 1 / 8), torch.zeros(400)
    spiked = resemblances(Mix(shares, anchor=(0, 1, 2)), given, received, size=400)[6, 7]
    bounded = resemblances(Mix(shares, anchor=(0, 1, 2), within=3.0), given, received, size=400)[6, 7]
    assert spiked < 0.1 < 0.8 < bounded


def test_an_update_that_equals_the_mean_is_like_no_other():
    given = {0: torch.tensor([1.0, 0.0, -1.0]), 1: torch.ones(3), 2: torch.tensor([1.0, 2.0, 3.0])}
    assert resemblances(Mix({0: 0.4, 1: 0.3, 2: 0.3}, anchor=(0,)), given, torch.zeros(3), size=3)[1, 2] == 0.0


def test_an_update_that_no_honest_client_sends_is_like_all():
    given, received = models(3), torch.zeros(40)
    given[4] = torch.full((40,), float("nan"))
    found = resemblances(Mix(SHARES, anchor=(0, 1)), given, received, size=40)
    assert (found[2, 4], found[3, 4]) == (1.0, 1.0)
    without = {k: share for k, share in SHARES.items() if k != 4}
    assert found[2, 3] == resemblances(Mix(without, anchor=(0, 1)), given, received, size=40)[2, 3]  # not in the mean


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 3.0), st.floats(0.5, 8.0))
def test_every_value_is_a_cosine(seed, step, within):
    mix = Mix(SHARES, {2: step, 3: step}, anchor=(0, 1), within=within)
    found = resemblances(mix, models(seed), torch.zeros(40), size=33)
    assert all(-1 - 1e-9 <= value <= 1 + 1e-9 for value in found.values())
