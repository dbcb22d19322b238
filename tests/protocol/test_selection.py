"""What a rule selects is checked before it is used."""

import math

import numpy as np
import pytest

import fedalign as fa
from fedalign.protocol.aggregate import check_selection, shares
from fedalign.protocol.messages import Present
from fedalign.protocol.roster import Roster

OFFERS = {k: fa.Offer(fa.Measure(1.0, None, 9)) for k in (2, 3)}


def checked(selection):
    return check_selection(fa.Everyone(), selection, OFFERS)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (fa.Selection((4,)), "names client 4, which offered nothing"),
        (fa.Selection((2,), weight={3: 1.0}), "gives a weight to client 3, which it does not select"),
        (fa.Selection((2,), scale={0: 0.0}), "gives a scale to client 0"),
        (fa.Selection((2,), step={3: 2.0}), "gives a step to client 3"),
        (fa.Selection((2,), weight={2: -0.5}), "the weight -0.5"),
        (fa.Selection((2,), scale={2: math.nan}), "the scale nan"),
        (fa.Selection((2,), step={2: math.inf}), "the step inf"),
        (fa.Selection((2,), weight={2: "much"}), "cannot be read"),
        (fa.Selection(3), "cannot be read"),
        ([2], "must return a fedalign.Selection"),
    ],
)
def test_selections_that_make_no_sense(selection, message):
    with pytest.raises(fa.FedalignError, match=message):
        checked(selection)


def test_selections_become_plain_numbers():
    found = checked(fa.Selection((k for k in (np.int64(2), 2, 3)), weight={np.int64(2): np.float32(0.5)}))
    assert (found.clients, found.weight) == ((2, 3), {2: 0.5})
    assert type(found.weight[2]) is float


def test_a_cap_holds_whatever_the_rule_says():
    present = Present(Roster(("a", "b"), (True, False), (10, 10), free_cap=1.0), (True, True))
    found = shares(present, [0, 1], fa.Selection((1,), scale={1: 1e9}))
    assert found == {0: 0.5, 1: 0.5}
