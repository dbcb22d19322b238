"""Options of attacks and adversaries: what makes no sense is refused with one sentence."""

import pytest
import torch

import fedalign as fa
from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Attack
from fedalign.attacks.data import Backdoor
from fedalign.attacks.hostile import HostileClients
from fedalign.registry import ATTACKS


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("alie", {"factor": "much"}, "factor must be a finite number, not 'much'"),
        ("ipm", {"factor": float("nan")}, "factor must be a finite number, not nan"),
        ("mimic", {"client": -1}, "client must be a whole number of at least 0, not -1"),
        ("at-cosine", {"cosine": "0.3"}, "cosine must be from -1 to 1, not '0.3'"),
        ("harmful-direction", {"length": 0}, "length must be a number above 0, not 0"),
        ("blend", {"honest": 1.5}, "honest must be from 0 to 1, not 1.5"),
        ("backdoor", {"row": -1}, "row must be a whole number of at least 0, not -1"),
        ("backdoor", {"column": 0.5}, "column must be a whole number of at least 0, not 0.5"),
        ("backdoor", {"size": 0}, "size must be a whole number of at least 1, not 0"),
        ("backdoor", {"poisoned": 0}, "poisoned must be a number above 0, not 0"),
        ("backdoor", {"poisoned": "half"}, "poisoned must be a number above 0, not 'half'"),
        ("backdoor", {"poisoned": 1.5}, "poisoned must be from 0 to 1, not 1.5"),
        ("sign-flip", {"scale": True}, "scale must be a number above 0, not True"),
    ],
)
def test_options_of_attacks(kind, options, message):
    with pytest.raises(fa.FedalignError, match=message):
        ATTACKS.find(kind)(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": []}, "names no attack"),
        ({"kind": "sign-flap"}, "sign-flap"),
        ({"kind": "zero", "fraction": 1.5}, "fraction must be a part of the free clients"),
        ({"kind": "zero", "report": "honest"}, "report is 'honest'"),
        ({"kind": "zero", "knows": "nothing"}, "knows is 'nothing'"),
        ({"kind": "zero", "samples": 0}, "samples must be a positive factor"),
        ({"kind": "zero", "last": 0}, "last must be a number of rounds"),
        ({"kind": "zero", "period": 1.5}, "period must be a number of rounds"),
        ({"kind": "zero", "start": -1}, "start must be a round"),
    ],
)
def test_options_of_an_adversary(options, message):
    with pytest.raises(fa.FedalignError, match=message):
        Adversary(**options)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((28, 28), Backdoor(row=24, column=24)), ((3, 8, 8), Backdoor(row=4)), ((12,), Backdoor(column=8))],
)
def test_a_trigger_outside_of_the_samples_is_an_error(shape, fits):
    samples = torch.zeros(5, *shape) + torch.arange(5.0).view(-1, *[1] * len(shape)), torch.arange(5)
    stamped, _ = fits.stamp(samples)
    assert stamped.shape == (4, *shape)
    outside = Backdoor(row=fits.row + (len(shape) > 1), column=fits.column + 100)
    with pytest.raises(fa.FedalignError, match="does not fit into samples"):
        outside.stamp(samples)


def test_an_attack_answers_for_every_hostile_client():
    class Forgets(Attack):
        changes_updates = True

        def send(self, updates, scene):
            return {}

    train = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    fed = fa.Federation.from_arrays(train, test=train, priority=[True, False, False], heldout_fraction=0.25)
    hostile = HostileClients(Adversary(Forgets(), fraction=0.5), fed, seed=0, rounds=1)
    (k,) = hostile.clients
    with pytest.raises(fa.FedalignError, match=f"Forgets.send gives updates for clients .*, not .{k}."):
        hostile.craft({k: torch.ones(2), 0: torch.ones(2)}, torch.zeros(2), 2, round=0)
