"""Options of attacks and adversaries: what makes no sense is refused with one sentence."""

import pytest
import torch

import fedalign as fa
from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Attack
from fedalign.attacks.data import Backdoor, BlendedBackdoor, IrrelevantData, LabelFlip
from fedalign.attacks.hostile import HostileClients, claimed_samples
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
        ("blended-backdoor", {"opacity": 1.5}, "opacity must be from 0 to 1, not 1.5"),
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
        ({"kind": None}, "must be an attack or a list of attacks, not None"),
        ({"kind": Attack}, "must be an attack or a list of attacks"),
        ({"kind": "zero", "clients": []}, "adversary.clients names nobody"),
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


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (10,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_blended_trigger_is_faint_and_everywhere(shape, dtype):
    draw = torch.Generator().manual_seed(0)
    x = (100 * torch.rand(6, *shape, generator=draw)).to(dtype)
    x[0].view(-1)[0] = 100
    attack = BlendedBackdoor(opacity=0.1, target=2)
    stamped, labels = attack.stamp((x, torch.arange(6)))
    assert stamped.shape == (5, *shape)
    assert stamped.dtype == dtype
    assert labels.tolist() == [2] * 5
    moved = stamped.double() - x[torch.arange(6) != 2].double()
    assert moved.abs().max() <= 0.1 * 255 + 0.5
    assert (moved != 0).double().mean() > 0.8


def test_a_blended_backdoor_harms_plain_fedavg():
    def images(seed):
        draw = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (60,), generator=draw)
        means = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(99))
        return means[y] + 0.3 * torch.randn(60, 8, 8, generator=draw), y

    data = [images(k) for k in range(8)]
    fed = fa.Federation.from_arrays(data, test=data, priority=[k < 2 for k in range(8)], heldout_fraction=0.25)

    def flat():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))

    adversary = Adversary("blended-backdoor(size=2, opacity=0.4)", fraction=0.5)
    local = fa.LocalSGD(lr=0.1, epochs=3, batch_size=20)
    specs = [fa.RunSpec(fed, rule, 15, local=local, adversary=adversary) for rule in (fa.PriorityOnly(), fa.Everyone())]
    alone, everyone = (r.history.final("attack_success") for r in fa.simulate_many(specs, flat, device="cpu"))
    assert everyone > alone + 0.3


class Own(Attack):
    """Gives what a test says."""

    changes_data = changes_updates = True

    def __init__(self, poison=None, send=None):
        self._poison, self._send = poison, send

    def poison(self, samples, classes, seed):
        return samples if self._poison is None else self._poison(*samples)

    def send(self, updates, scene):
        return updates.own if self._send is None else self._send(updates.own)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (Own(lambda x, y: (torch.cat([x, x]), torch.cat([y, y]))), r"Own.poison gives features of shape \(\d+, 2\)"),
        (Own(lambda x, y: (x[:1], y[:1])), "they must have the shape"),
        (Own(lambda x, y: (x.double(), y)), "type torch.float64"),
        (Own(lambda x, y: (x, y.float())), "gives labels of shape"),
        (Own(lambda x, y: (x, y + 7)), "gives labels that are not from 0 to 1"),
        (Own(lambda x, y: None), "must give two tensors, features and labels, not NoneType"),
        (Own(send=lambda own: None), "Own.send must give a tensor for each hostile client"),
        (Own(send=lambda own: dict.fromkeys(own, 3.0)), "Own.send must give a tensor for each hostile client"),
    ],
)
def test_what_an_own_attack_gives_is_checked(attack, message):
    train = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    fed = fa.Federation.from_arrays(train, test=train, priority=[True, False, False], heldout_fraction=0.25)
    with pytest.raises(fa.FedalignError, match=message):
        fa.simulate(
            fed, lambda: torch.nn.Linear(2, 2), fa.Everyone(), 1, 0.0, adversary=Adversary(attack), device="cpu"
        )


def test_attacks_on_tokens_keep_to_the_vocabulary():
    tokens, labels = torch.randint(3, 20, (50, 6)), torch.arange(50) % 4
    found, _ = IrrelevantData().poison((tokens, labels), 4, 0)
    assert 3 <= int(found.min()) <= int(found.max()) < 20
    assert found.dtype == tokens.dtype
    pixels = torch.full((50, 6), 7, dtype=torch.uint8)
    assert int(IrrelevantData().poison((pixels, labels), 4, 0)[0].max()) > 200


@pytest.mark.parametrize("attack", [Backdoor(), BlendedBackdoor()])
def test_a_backdoor_where_every_sample_has_its_target_or_several_labels(attack):
    x, y = torch.randn(5, 8), torch.zeros(5, dtype=torch.long)
    stamped, wanted = attack.stamp((x, y))
    assert (len(stamped), len(wanted)) == (0, 0)
    for step in (attack.stamp, lambda samples: attack.poison(samples, 3, 0)):
        with pytest.raises(fa.FedalignError, match=r"one label a sample; here a sample has \(6,\)"):
            step((x, torch.zeros(5, 6, dtype=torch.long)))


def test_flipped_answers_and_numbers():
    answers = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert torch.equal(LabelFlip().poison((answers, answers), 0, 0)[1], 1 - answers)
    numbers = torch.tensor([[0.5], [-2.0]])
    assert torch.equal(LabelFlip().poison((numbers, numbers), 0, 0)[1], -numbers)


def test_an_absurd_sample_count_is_a_number():
    assert claimed_samples(Adversary("zero", samples=1e308), 64) > 1e300
