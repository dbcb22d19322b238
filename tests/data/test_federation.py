from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import blobs, linear
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa


def two(first=None, second=None, **options):
    clients = [first or blobs(20, 1), second or blobs(10, 2)]
    return fa.Federation.from_arrays(clients, priority=[True, False], **options)


def test_weights_are_over_the_priority_total():
    fed = fa.Federation.from_arrays([blobs(n, n) for n in (30, 10, 80)], priority=[1, 1, 0], heldout_fraction=0)
    assert fed.p.tolist() == [0.75, 0.25, 2.0]


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(lambda c: sum(c) >= 2),
    fraction=st.sampled_from([0.05, 0.2, 0.5, 0.9]),
    seed=st.integers(0, 5),
)
def test_the_split_is_stratified_and_loses_nothing(counts, fraction, seed):
    y = np.repeat(np.arange(len(counts)), counts)
    fed = two((np.arange(len(y), dtype=np.float32)[:, None], y), (np.zeros((5, 1), np.float32), [0] * 5),
              heldout_fraction=fraction, seed=seed)  # fmt: skip
    client = fed.clients[0]
    assert sorted([*client.train, *client.heldout]) == list(range(len(y)))
    assert len(client.train) >= 1
    assert len(client.heldout) == min(max(1, int(fraction * len(y) + 0.5)), len(y) - 1)
    for label, count in enumerate(counts):
        held = int((fed.pool.y[client.heldout] == label).sum())
        assert abs(held - count * len(client.heldout) / len(y)) < 1


def test_the_split_depends_on_the_seed_and_the_client_alone():
    fed, again, other = two(), two(), two(seed=1)
    assert np.array_equal(fed.clients[0].heldout, again.clients[0].heldout)
    assert not np.array_equal(fed.clients[0].heldout, other.clients[0].heldout)
    alone = fa.Federation.from_arrays([blobs(20, 1), blobs(10, 2), blobs(9, 3)], priority=[True, False, False])
    assert np.array_equal(fed.clients[1].heldout - 20, alone.clients[1].heldout - 20)


def test_a_client_with_one_sample_matches_on_it():
    with pytest.warns(fa.FederationWarning, match="client '1' has one sample"):
        fed = two(second=blobs(1, 2))
    assert fed.clients[1].train.tolist() == fed.clients[1].heldout.tolist() == [20]


def test_heldout_given():
    fed = fa.Federation.from_arrays([blobs(20, 1)] * 2, heldout=[blobs(5, 3)] * 2, priority=[True, False])
    assert (len(fed.clients[0].train), len(fed.clients[0].heldout)) == (20, 5)


def test_all_priority_is_allowed_and_said():
    with pytest.warns(fa.FederationWarning, match="all 2 clients are priority"):
        fed = fa.Federation.from_arrays([blobs(9, 1), blobs(9, 2)], priority=[True, True])
    assert len(fa.simulate(fed, linear, rounds=2).history) == 2


def test_masks_are_rows():
    mask = np.arange(9) < 4
    fed = fa.Federation.from_partition(blobs(9, 1), [mask, ~mask], priority=[True, False], heldout_fraction=0)
    assert [c.train.tolist() for c in fed.clients] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]


def test_numpy_numbers_are_numbers():
    fed = two()
    result = fa.simulate(
        fed, linear, fa.Align(np.float32(0.2)), rounds=np.int64(2), warmup=np.float64(0.5), seed=np.int64(3),
        local=fa.LocalSGD(lr=np.float32(0.1), epochs=np.int64(1), batch_size=np.int64(5)),
    )  # fmt: skip
    assert len(result.history) == 2


def test_labels_and_features_of_other_types():
    x, y = blobs(20, 1)
    kinds = [(x.astype(np.float64), y.astype(np.int32)), (x.astype(np.float64).tolist(), y.astype(np.uint8).tolist())]
    fed = fa.Federation.from_arrays([(x.astype(np.float64), y.astype(np.int32)), kinds[0]], priority=[True, False])
    assert fed.pool.y.dtype == torch.int64
    assert len(fa.simulate(fed, linear, rounds=1).history) == 1
    double = fa.simulate(fed, lambda: linear().double(), rounds=1).model
    assert double.weight.dtype == torch.float64
    assert len(fa.Federation.from_arrays([kinds[1]] * 2, priority=[True, False]).clients[0].train) == 16


def test_from_partition_shares_the_pool():
    x, y = blobs(50, 1)
    pool = fa.Pool(torch.as_tensor(x), torch.as_tensor(y))
    parts = [range(0, 20), range(20, 50)]
    first, second = (fa.Federation.from_partition(pool, parts, priority=[True, False], seed=s) for s in (0, 1))
    assert first.pool is second.pool
    xt, yt = blobs(8, 2)
    tested = fa.Federation.from_partition(
        (x, y), parts, priority=[True, False], test=(xt, yt), test_parts=[[0, 1], [7]]
    )
    assert tested.clients[1].test.tolist() == [57]
    assert torch.equal(tested.pool.x[57], torch.as_tensor(xt[7]))


def save(folder, name, **arrays):
    np.savez(folder / f"{name}.npz", **arrays)


def test_from_folder(tmp_path):
    x, y = blobs(20, 1)
    save(tmp_path, "site-a", x=x, y=y, priority=True, x_test=x[:5], y_test=y[:5])
    save(tmp_path, "site-b", x=x, y=y, priority=False)
    fed = fa.Federation.from_folder(tmp_path)
    assert fed.roster.names == ("site-a", "site-b")
    assert fed.roster.priority == (True, False)
    assert (len(fed.clients[0].test), len(fed.clients[1].test)) == (5, 0)
    named = fa.Federation.from_folder(tmp_path, priority=["site-b"])
    assert named.roster.priority == (False, True)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": 1}, "only one of x and y"),
        ({"y": 1}, "only one of x and y"),
        ({}, "no arrays x and y"),
        ({"x": 1, "y": 1, "x_tets": 1}, "did you mean 'x_test'"),
        ({"x": 1, "y": 1, "x_test": 1, "priority": 1}, "only one of x_test and y_test"),
        ({"x": 1, "y": 1, "priority": 2}, "must be a single true or false"),
        ({"x": 1, "y": 1}, "does not say whether it is a priority client"),
    ],
)
def test_bad_files(tmp_path, arrays, message):
    save(tmp_path, "site-a", **{k: np.ones(v) for k, v in arrays.items()})
    with pytest.raises(fa.FedalignError, match=message):
        fa.Federation.from_folder(tmp_path)


def test_bad_folders(tmp_path):
    with pytest.raises(fa.FedalignError, match="no folder"):
        fa.Federation.from_folder(tmp_path / "none")
    with pytest.raises(fa.FedalignError, match=r"no \.npz, \.csv or \.parquet files"):
        fa.Federation.from_folder(tmp_path)
    (tmp_path / "site-a.npz").write_bytes(b"not a zip")
    with pytest.raises(fa.FedalignError, match="cannot read"):
        fa.Federation.from_folder(tmp_path)
    save(tmp_path, "site-a", x=blobs(9, 1)[0], y=blobs(9, 1)[1])
    with pytest.raises(fa.FedalignError, match="did you mean 'site-a'"):
        fa.Federation.from_folder(tmp_path, priority=["site_a"])


def spoiled(value):
    x, y = blobs(10, 2)
    x[3, 2] = value
    return x, y


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fa.Federation.from_arrays([blobs(9, 1)] * 2, priority=[False, False]),
            "no client is a priority client",
        ),
        (lambda: fa.Federation.from_arrays([], priority=[]), "no clients"),
        (lambda: fa.Federation.from_arrays([blobs(9, 1)], priority=[True, False]), "2 priority flags for 1 clients"),
        (lambda: two(second=(np.zeros((0, 6), np.float32), [])), "client '1', training data: there are no samples"),
        (lambda: two(second=spoiled(np.nan)), "client '1', training data: the features of sample 3 hold NaN"),
        (
            lambda: two(second=spoiled(np.inf)),
            "client '1', training data: the features of sample 3 hold NaN or infinity",
        ),
        (lambda: two(second=(blobs(9, 1)[0], [0.5, np.nan] + [0.0] * 7)), "the labels hold NaN"),
        (lambda: two(second=(blobs(9, 1)[0], [-1] * 9)), "label -1 is negative"),
        (lambda: two(second=(blobs(9, 1)[0], [0] * 8)), "don't match"),
        (lambda: two(second=(np.zeros((9, 5), np.float32), [0] * 9)), r"samples are float32 of shape \(5,\)"),
        (lambda: two(second=(blobs(9, 1)[0], [0.5] * 9)), "labels are float32"),
        (
            lambda: fa.Federation.from_partition(blobs(9, 1), [[0, 1], [2]], priority=[1, 0], names=["a"]),
            "1 names for 2",
        ),
        (lambda: fa.Federation.from_partition(blobs(9, 1), [[0.5, 1]], priority=[True]), "whole numbers"),
        (lambda: fa.Federation.from_partition(blobs(9, 1), [[0, -1]], priority=[True]), "row -1 is outside"),
        (lambda: fa.Federation.from_partition(blobs(9, 1), [[True, False]], priority=[True]), "one entry per sample"),
        (
            lambda: fa.Federation.from_partition(
                (torch.zeros(9, 6, dtype=torch.uint8), [0] * 9),
                [range(9)],
                priority=[1],
                test=blobs(5, 1),
                test_parts=[[0]],
            ),
            "the test data: samples are float32",
        ),
        (lambda: fa.Pool(torch.full((3, 2), torch.nan), torch.zeros(3)), "hold NaN"),
        (lambda: fa.Pool(torch.zeros(3, 2), torch.tensor([0, -1, 0])), "negative"),
        (lambda: fa.Pool(torch.zeros(3, 2), torch.zeros(2)), "don't match"),
        (lambda: fa.Pool(torch.zeros(3, 2), torch.zeros(3), std=0.0), "std must be a positive number"),
        (lambda: fa.Pool(torch.zeros(3, 2), torch.zeros(3), mean=(1.0, 2.0, 3.0)), r"one per channel \(2\)"),
        (lambda: two(heldout_fraction=1.0), "heldout_fraction must be in"),
        (lambda: two(names=["a", "a"]), "two clients are called 'a'"),
        (lambda: fa.Federation.from_partition(blobs(9, 1), [[0, 9]], priority=[True]), "row 9 is outside"),
        (
            lambda: fa.Federation.from_partition(blobs(9, 1), [[0, 1], []], priority=[True, False]),
            "client '1' has no samples",
        ),
        (lambda: two(second=("text", [1])), "cannot be read"),
    ],
)
def test_bad_data(make, message):
    with pytest.raises(fa.FedalignError, match=message):
        make()
    assert issubclass(fa.FedalignError, ValueError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": lambda: torch.nn.Linear(6, 3)},
            "client '0' has label 3 in its train data, but the model has 3 outputs",
        ),
        ({"model": lambda: torch.nn.Linear(5, 4)}, r"does not take float32 samples of shape \(6,\)"),
        ({"model": lambda: 3}, "must be a torch.nn.Module"),
        ({"model": torch.nn.Flatten}, "no trainable parameters"),
        ({"model": lambda: torch.nn.LazyLinear(4)}, "lazy layers"),
        ({"rule": fa.PriorityOnly}, "rule must be"),
        ({"local": 0.1}, "local must be a fedalign.LocalOptimizer"),
        ({"participation": fa.Full}, "participation must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": None}, "seed must be"),
        ({"chunk": -1}, "chunk must be"),
        ({"warmup": "0.1"}, "warmup must be"),
        ({"loss": lambda o, y: torch.zeros(1)}, "one number per sample"),
        ({"rounds": 0}, "rounds must be"),
        ({"rounds": 2.5}, "rounds must be"),
        ({"warmup": -0.1}, "warmup must be"),
        ({"warmup": 300}, "warmup must be"),
        ({"device": "tpu"}, "device"),
        ({"engine": "bached"}, "did you mean 'batched'"),
        ({"loss": lambda o, y: torch.nn.functional.cross_entropy(o, y)}, "one number per sample"),
        ({"loss": lambda o, y: o.gather(9, y)}, "the loss fails"),
        ({"local": fa.LocalSGD(lr=lambda t: 0.1 - 0.01 * t, epochs=1)}, "lr is 0.0 in round 10"),
        ({"rule": fa.Align(lambda t: 1.0 - t)}, "epsilon is -1.0 in round 2"),
    ],
)
def test_bad_simulations(options, message):
    with pytest.raises(fa.FedalignError, match=message):
        fa.simulate(two(), **{"model": linear, "rounds": 20, "device": "cpu", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(fa.FedalignError, match="finds no GPU"):
        fa.simulate(two(), linear, device="cuda")


@pytest.mark.parametrize("epsilon", [-0.1, float("nan"), "0.2", None, True])
def test_bad_epsilon(epsilon):
    with pytest.raises(fa.FedalignError, match="epsilon"):
        fa.Align(epsilon)


@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"epochs": 1.5}, {"epochs": 1, "batch_size": 0},
     {"epochs": 1, "momentum": -1}, {"epochs": 1, "clip": 0}, {"epochs": 1, "mu": float("nan")}, {"steps": -3}],
)  # fmt: skip
def test_bad_local_work(options):
    with pytest.raises(fa.FedalignError):
        fa.LocalSGD(lr=0.1, **options)


def test_bad_match():
    for options in ({"on": "los"}, {"match_on": "test"}):
        with pytest.raises(fa.FedalignError):
            fa.Align(0.1, **options)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_memory_mapped_data_is_not_copied(tmp_path, kind):
    draw = np.random.default_rng(0)
    x, y = (draw.random((60, 6)) * 200).astype(kind), draw.integers(0, 3, 60)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    parts = [np.arange(0, 20), np.arange(20, 60)]
    fed = fa.Federation.from_partition((mapped, y), parts, priority=[True, False])
    assert fed.pool.x.data_ptr() == mapped.ctypes.data
    held = fa.Federation.from_partition((x, y), parts, priority=[True, False])
    runs = [fa.simulate(f, lambda: torch.nn.Linear(6, 3), fa.Everyone(), 2, 0, device="cpu") for f in (fed, held)]
    assert torch.equal(runs[0].model.weight, runs[1].model.weight)
