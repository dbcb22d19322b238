"""What attacks send, on plain vectors: against byzfl, against their own bounds, and their refusals."""

import numpy as np
import pytest
import torch
from independent_attacks import load_byzfl_attacks

import fedalign as fa
from fedalign.attacks.attack import Scene, Updates
from fedalign.attacks.colluding import AtCosine, Blend, InnerProduct, LittleIsEnough, Mimic, MinMax, MinSum
from fedalign.attacks.data import Backdoor, IrrelevantData, LabelFlip
from fedalign.attacks.evasion import Decoys, Disguise
from fedalign.attacks.updates import BadBuffers, Copied, Gaussian, NotFinite, Scaling, SignFlip, Zero
from fedalign.registry import ATTACKS

SCENE = Scene(seed=3, round=2, rounds=10)


@pytest.fixture
def byzfl(monkeypatch):
    return load_byzfl_attacks(monkeypatch)


def vectors(clients=9, numbers=40, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(clients, numbers, generator=draw, dtype=torch.float64) + 0.3


def sent(attack, honest, hostile=3):
    own = {100 + k: honest.mean(0) for k in range(hostile)}
    found = attack.send(Updates(own, honest), SCENE)
    assert list(found) == list(own)
    return next(iter(found.values()))


@pytest.mark.parametrize("clients", [2, 5, 12])
def test_they_equal_byzfls(byzfl, clients):
    honest = vectors(clients)
    for ours, theirs in (
        (SignFlip(), byzfl.SignFlipping()),
        (LittleIsEnough(factor=1.5), byzfl.ALittleIsEnough(tau=1.5)),
        (LittleIsEnough(factor=-0.7), byzfl.ALittleIsEnough(tau=-0.7)),
        (InnerProduct(factor=2.0), byzfl.InnerProductManipulation(tau=2.0)),
        (InnerProduct(factor=0.4), byzfl.InnerProductManipulation(tau=0.4)),
        (Mimic(), byzfl.Mimic(epsilon=0)),
        (Mimic(client=1), byzfl.Mimic(epsilon=1)),
    ):
        expected = torch.from_numpy(np.asarray(theirs(honest.numpy())))
        assert torch.allclose(sent(ours, honest), expected, atol=1e-6), ours


@pytest.mark.parametrize("hostile", [1, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_optimal_factors_equal_byzfls(byzfl, hostile, seed):
    honest = vectors(11, seed=seed)
    for against, theirs in (
        ("mean", byzfl.Average()),
        ("median", byzfl.Median()),
        (f"trimmed-mean(trim={hostile})", byzfl.TrMean(f=hostile)),
        (fa.MultiKrum(f=hostile), byzfl.MultiKrum(f=hostile)),
    ):
        for ours, kind in (
            (LittleIsEnough, byzfl.Optimal_ALittleIsEnough),
            (InnerProduct, byzfl.Optimal_InnerProductManipulation),
        ):
            expected = kind(agg=theirs, pre_agg_list=[], f=hostile)(honest.numpy())
            found = sent(ours(against=against), honest, hostile)
            assert torch.allclose(found, torch.from_numpy(np.asarray(expected)), atol=1e-6), (ours, against)


def test_a_searched_factor_harms_at_least_as_much_as_the_usual_one():
    honest = vectors(11)
    for attack in (LittleIsEnough, InnerProduct):
        for aggregator in (fa.CoordinateMedian(), fa.TrimmedMean(3), fa.GeometricMedian()):
            harm = {}
            for against in (None, aggregator):
                rows = torch.cat([honest, sent(attack(against=against), honest).expand(3, -1)])
                combined = aggregator.combine(rows, torch.full((14,), 1 / 14, dtype=torch.float64))
                harm[against] = float((combined - honest.mean(0)).norm())
            assert harm[aggregator] >= harm[None] - 1e-9, (attack, aggregator)


@pytest.mark.parametrize("seed", range(5))
def test_min_max_keeps_to_its_bound_and_is_maximal(seed):
    honest = vectors(7, seed=seed)
    bound = torch.cdist(honest, honest).max()
    found = sent(MinMax(), honest)
    farther = honest.mean(0) + (found - honest.mean(0)) * 1.001
    assert torch.cdist(found[None], honest).max() <= bound * (1 + 1e-9)
    assert torch.cdist(farther[None], honest).max() > bound


@pytest.mark.parametrize("seed", range(5))
def test_min_sum_keeps_to_its_bound_and_is_maximal(seed):
    honest = vectors(7, seed=seed)
    bound = torch.cdist(honest, honest).square().sum(1).max()
    found = sent(MinSum(), honest)
    farther = honest.mean(0) + (found - honest.mean(0)) * 1.001
    assert (found - honest).square().sum() <= bound * (1 + 1e-9)
    assert (farther - honest).square().sum() > bound


def test_one_known_update_has_no_spread():
    honest = vectors(1)
    for attack in (MinMax(), MinSum(), LittleIsEnough()):
        assert torch.equal(sent(attack, honest), honest[0])


@pytest.mark.parametrize(("cosine", "length"), [(0.3, 1.0), (0.01, 9.9), (-0.5, 2.0)])
def test_a_bent_update_has_its_cosine_and_length(cosine, length):
    honest, harmful = vectors(6), vectors(3, seed=9)
    own = dict(enumerate(harmful))
    found = AtCosine(cosine, length).send(Updates(own, honest), SCENE)[0]
    assert float(torch.cosine_similarity(found, honest.mean(0), dim=0)) == pytest.approx(cosine)
    assert float(found.norm() / honest.norm(dim=1).median()) == pytest.approx(length)
    assert float(found @ harmful.mean(0)) > float(found @ -harmful.mean(0))


def test_simple_attacks():
    honest = vectors(3)
    own = {7: honest[0] * 2, 8: honest[1]}
    updates = Updates(own, honest)
    assert torch.equal(Scaling(3.0).send(updates, SCENE)[7], honest[0] * 6)
    assert not Zero().send(updates, SCENE)[8].any()
    assert torch.equal(Copied().send(updates, SCENE)[8], honest[1])
    assert torch.equal(Blend(0.25).send(updates, SCENE)[8], honest.mean(0) * 0.25 + honest[1] * 0.75)
    noise = Gaussian(2.0).send(updates, SCENE)
    assert float(noise[7].norm()) == pytest.approx(2 * float(own[7].norm()))
    assert torch.equal(noise[7], Gaussian(2.0).send(updates, SCENE)[7])
    assert not torch.equal(noise[8], Gaussian(2.0).send(updates, Scene(3, 5, 10))[8])
    assert NotFinite("-inf").send(updates, SCENE)[7][0] == -torch.inf
    assert bool((BadBuffers().spoil(torch.tensor([0.5, 3.0])) < 0).all())


def test_attacks_on_data():
    x, y = torch.randn(100, 5), torch.arange(100) % 4
    assert torch.equal(LabelFlip().poison((x, y), 4, 0)[1], 3 - y)
    noise, labels = IrrelevantData().poison((x, y), 4, 1)
    assert noise.shape == x.shape
    assert not torch.equal(noise, IrrelevantData().poison((x, y), 4, 2)[0])
    assert set(labels.tolist()) == {0, 1, 2, 3}
    backdoor = Backdoor(target=2, size=2, poisoned=0.3)
    new, labels = backdoor.poison((x, y), 4, 0)
    changed = (new != x).any(1)
    assert changed.sum() in (29, 30)
    assert bool((labels[changed] == 2).all())
    assert torch.equal(labels[~changed], y[~changed])
    stamped, wanted = backdoor.stamp((x, y))
    assert len(wanted) == 75
    assert bool((stamped[:, :2] == x.max()).all())
    assert torch.equal(stamped[:, 2:], x[y != 2][:, 2:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sign-flip(scale=-1)", "scale must be a number above 0, not -1"),
        ("alie(factor=inf)", "factor must be a finite number, not inf"),
        ("alie(against='medain')", "against is 'medain'; did you mean 'median'?"),
        ("at-cosine(cosine=2)", "cosine must be from -1 to 1, not 2"),
        ("blend(honest=1.5)", "honest must be from 0 to 1, not 1.5"),
        ("mimic(client=-1)", "client must be a whole number of at least 0, not -1"),
        ("not-finite(value='big')", "must be 'nan', 'inf' or '-inf', not 'big'"),
        ("backdoor(poisoned=0)", "poisoned must be a number above 0, not 0"),
        ("backdoor(target=-1)", "target must be a whole number of at least 0, not -1"),
        ("backdoor(size=0)", "size must be a whole number of at least 1, not 0"),
    ],
)
def test_bad_options_are_refused(text, message):
    with pytest.raises(fa.FedalignError) as error:
        fa.Adversary(text)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ATTACKS.entries)
def test_every_attack_of_the_registry_can_be_made(name):
    assert isinstance(fa.Adversary(name).attacks[0], fa.Attack)


def test_disguised_updates_have_little_in_common_and_the_same_sum():
    common = vectors(1, numbers=400)[0]
    sent = Disguise(noise=2.0).send(Updates(dict.fromkeys(range(5), common), common[None]), SCENE)
    rows = torch.stack(list(sent.values()))
    assert torch.allclose(rows.mean(0), common)
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)[~torch.eye(5, dtype=bool)]
    assert cosines.max() < 0.3  # without noise 1
    assert torch.allclose((rows - common).norm(dim=1).mean(), 2 * common.norm())
    assert not torch.equal(rows, torch.stack(list(Disguise(noise=2.0).send(
        Updates(dict.fromkeys(range(5), common), common[None]), Scene(3, 3, 10)).values())))  # fmt: skip


def test_an_attacker_alone_has_nobody_to_hide_from():
    own = {7: vectors(1)[0]}
    assert Disguise().send(Updates(own, vectors(3)), SCENE) is own


def test_decoys_are_like_honest_updates_and_the_others_stay_as_they_are():
    honest, own = vectors(12, numbers=400), {k: vectors(1, 400, seed=k)[0] for k in range(100, 104)}
    sent = Decoys(count=2).send(Updates(own, honest), SCENE)
    assert all(sent[k] is own[k] for k in (102, 103))
    apart = lambda rows: rows - honest.mean(0)  # noqa: E731
    cosine = torch.nn.functional.cosine_similarity
    usual = cosine(apart(honest)[:, None], apart(honest)[None], dim=-1).fill_diagonal_(-1).max()
    for i, k in enumerate((100, 101)):
        assert cosine(apart(sent[k])[None], apart(honest[i::2])).min() > usual
        assert apart(sent[k]).norm() == pytest.approx(float(apart(honest).norm(dim=1).median()))


def test_attackers_that_know_only_their_own_updates_send_the_stated_length():
    own = {7: vectors(1)[0], 8: vectors(1, seed=1)[0]}
    sent = AtCosine(cosine=0.01, length=3.0).send(Updates(own, torch.stack([own[7]] * 2)), SCENE)
    assert float(sent[7].norm()) == pytest.approx(3 * float(own[7].norm()))
    common = torch.stack(list(own.values()))
    alone = AtCosine(cosine=0.01, length=3.0).send(Updates(own, common.mean(0)[None]), SCENE)
    assert torch.allclose(alone[7] / alone[7].norm(), common.mean(0) / common.mean(0).norm())
