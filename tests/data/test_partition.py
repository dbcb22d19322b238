"""Partitions: facts on label counts of the real data sets, and properties on any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalign.data import images
from fedalign.data.partition import by_sizes, dirichlet, iid, largest_shard, limited, mix_counts, shards, with_same_mix
from fedalign.errors import FedalignError, FederationWarning

#: Samples a class, classes, shards a client, samples a shard: as the paper's partitions have them.
REAL = {
    "fmnist": (6000, 1000, 10, 2, 500),
    "emnist": (2400, 400, 47, 10, 180),
    "cifar10": (5000, 1000, 10, 2, 416),
    "emnist47-redrawn": (841, 140, 47, 10, 64),
}


def labels_of(each, classes, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


@pytest.mark.parametrize("name", REAL)
def test_the_papers_partitions(name):
    each, test_each, classes, mine, size = REAL[name]
    train, test = labels_of(each, classes), labels_of(test_each, classes, 1)
    parts = shards(train, 60, mine, size, seed=3)
    assert len(np.unique(np.concatenate(parts))) == 60 * mine * size  # no sample at two clients
    for k, part in enumerate(parts):
        counts = np.bincount(train[part], minlength=classes)
        assert (counts % size == 0).all()
        assert counts.sum() == mine * size
        rows = with_same_mix(part, train, test, 1000, 3, k)
        assert len(np.unique(rows)) == len(rows) > 0
        exact = counts * len(rows) / counts.sum()
        assert np.abs(np.bincount(test[rows], minlength=classes) - exact).max() <= 1
    assert not np.array_equal(parts[0], shards(train, 60, mine, size, seed=4)[0])
    assert all(np.array_equal(a, b) for a, b in zip(parts, shards(train, 60, mine, size, seed=3), strict=True))


def test_too_many_shards_are_refused_with_what_is_possible():
    train = labels_of(2400, 47)
    with pytest.raises(FedalignError, match="need 1440 single-class shards; the data has 611: at most 77"):
        shards(train, 60, 24, 180)
    parts = shards(train, 60, 24, 180, replacement=True)
    assert [len(part) for part in parts] == [24 * 180] * 60
    assert all(len(np.unique(part)) == len(part) for part in parts)  # no shard twice at one client
    assert len(np.unique(np.concatenate(parts))) < 60 * 24 * 180


def test_smaller_shards_where_the_data_has_less(monkeypatch):
    settings = images.Emnist(shards=10, shard_size=180)
    with pytest.warns(FederationWarning, match="600 single-class shards of at most 64 samples, not 180"):
        parts = settings.parts(labels_of(841, 47), seed=0)
    assert {len(part) for part in parts} == {640}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_largest_shard_is_the_largest(sizes, needed):
    found = largest_shard(sizes, needed)
    assert found == 0 or sum(n // found for n in sizes) >= needed
    assert sum(n // (found + 1) for n in sizes) < needed


@given(st.integers(2, 6), st.integers(10, 40), st.floats(0.3, 50), st.integers(0, 5))
def test_dirichlet_and_iid_deal_everything_once(clients, each, alpha, seed):
    labels = labels_of(each, 4)
    for parts in (dirichlet(labels, clients, alpha, seed), iid(labels, clients, seed)):
        assert len(parts) == clients
        assert sorted(np.concatenate(parts).tolist()) == list(range(4 * each))


def test_dirichlet_mixes_by_alpha():
    labels = labels_of(500, 10)

    def largest_share(alpha):
        counts = [np.bincount(labels[part], minlength=10) for part in dirichlet(labels, 10, alpha)]
        return np.mean([c.max() / c.sum() for c in counts])

    assert largest_share(0.1) > 0.4
    assert largest_share(1000) < 0.13
    with pytest.raises(FedalignError, match=r"data\.alpha must be positive"):
        dirichlet(labels, 3, 0)
    with pytest.raises(FedalignError, match="larger alpha or fewer clients"):
        dirichlet(labels_of(2, 2), 4, 0.001)


def test_sizes():
    labels = labels_of(5, 4)
    parts = by_sizes(labels, [7, 1, 3], seed=2)
    assert [len(part) for part in parts] == [7, 1, 3]
    assert len(np.unique(np.concatenate(parts))) == 11
    for bad in ([], [0, 3], [20, 1]):
        with pytest.raises(FedalignError, match=r"data\.sizes"):
            by_sizes(labels, bad)
    with pytest.raises(FedalignError, match="not enough"):
        iid(labels, 21)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 200))
def test_mixes_are_within_one(mix, total):
    counts = mix_counts(np.array(mix), total)
    assert counts.sum() == total
    assert np.abs(counts - np.array(mix) * total / sum(mix)).max() < 1


def test_fewer_samples_keep_the_mix():
    labels = np.repeat([0, 1], [300, 100])
    kept = limited(np.arange(400), labels, 40, seed=1, client=0)
    assert np.bincount(labels[kept]).tolist() == [30, 10]
    assert limited(np.arange(30), labels, 40, seed=1, client=0) is not None
    with pytest.raises(FedalignError, match="no sample of class 1"):
        with_same_mix(np.arange(400), labels, np.zeros(9, int), None, 0, 5)
    few = with_same_mix(np.arange(400), labels, np.repeat([0, 1], [30, 5]), None, 0, 5)
    assert len(few) == 20  # as many as class 1 allows


@pytest.mark.parametrize("kind", ["shards", "dirichlet", "iid", "sizes"])
def test_federations_of_every_kind(kind, monkeypatch):
    train, test = labels_of(60, 10), labels_of(20, 10, 1)
    y = images.torch.from_numpy(np.concatenate([train, test]))
    pool = images.Pool(images.torch.zeros(len(y), 1, 4, 4, dtype=images.torch.uint8), y)
    monkeypatch.setattr(images.ImageData, "pool", lambda self: (pool, 600))
    settings = images.FashionMnist(
        clients=6, partition=kind, sizes=[20, 30, 40, 50, 60, 70] if kind == "sizes" else None, shards=2
    )
    fed = settings.federation(0)
    again = settings.federation(0)
    seen = set()
    for client, same in zip(fed.clients, again.clients, strict=True):
        own = {*client.train.tolist(), *client.heldout.tolist()}
        assert not own & seen
        assert not set(client.train.tolist()) & set(client.heldout.tolist())
        assert client.test.min() >= 600
        assert np.array_equal(client.train, same.train)
        seen |= own
    assert [client.priority for client in fed.clients] == [True, True, False, False, False, False]
