"""Own data in every form: tables, files, data sets of other libraries, texts as labels, unusual arrays."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import fedalign as fa


def frame(seed=0, n=30):
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=n), draw.integers(0, 5, n)
    return pd.DataFrame({"a": a, "b": b, "flag": a > 0, "label": np.where(a + b > 2, "yes", "no")})


FRAMES = {f"s{k}": frame(k) for k in range(3)}


def same(one, other):
    return torch.equal(one.pool.x, other.pool.x) and torch.equal(one.pool.y, other.pool.y)


@pytest.fixture
def expected():
    train = [
        (f[["a", "b", "flag"]].astype(float).to_numpy(), (f["label"] == "yes").to_numpy()) for f in FRAMES.values()
    ]
    return fa.Federation.from_arrays(train, priority=[True, False, False])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_a_client(suffix, expected):
    Path("d").mkdir()
    for name, table in FRAMES.items():
        table.to_csv(f"d/{name}.csv", index=False) if suffix == "csv" else table.to_parquet(f"d/{name}.parquet")
    fed = fa.Federation.from_folder("d", target="label", priority="s0")
    assert same(fed, expected)
    assert fed.pool.classes == ("no", "yes")
    assert fed.roster.names == ("s0", "s1", "s2")
    assert fed.roster.priority == (True, False, False)


def test_frames_and_one_table_with_all_clients(expected):
    assert same(fa.Federation.from_clients(FRAMES, target="label", priority=["s0"]), expected)
    table = pd.concat([f.assign(site=name) for name, f in FRAMES.items()])
    assert same(fa.Federation.from_clients(table, client="site", target="label", priority=["s0"]), expected)
    table.to_csv("all.csv", index=False)
    fed = fa.Federation.from_folder("all.csv", client="site", target="label", priority=["s0"])
    assert torch.allclose(fed.pool.x, expected.pool.x)


def test_order_of_columns_does_not_matter(expected):
    turned = {**FRAMES, "s2": FRAMES["s2"][["label", "flag", "b", "a"]]}
    assert same(fa.Federation.from_clients(turned, target="label", priority=["s0"]), expected)


def test_splits_from_a_column_and_from_sub_folders():
    for part in ("d/test", "d/heldout"):
        Path(part).mkdir(parents=True)
    marked = {n: f.assign(part=["train"] * 15 + ["heldout"] * 8 + ["test"] * 7) for n, f in FRAMES.items()}
    by_column = fa.Federation.from_clients(marked, target="label", split="part", priority=["s0"])
    for name, f in FRAMES.items():
        for folder, rows in (("d", slice(0, 15)), ("d/heldout", slice(15, 23)), ("d/test", slice(23, 30))):
            f[rows].to_parquet(f"{folder}/{name}.parquet")
    by_folder = fa.Federation.from_folder("d", target="label", priority=["s0"])
    assert same(by_column, by_folder)
    assert [(len(c.train), len(c.heldout), len(c.test)) for c in by_column.clients] == [(15, 8, 7)] * 3


def test_test_fraction_is_disjoint_and_stratified():
    x, y = np.arange(200.0)[:, None], np.arange(200) % 2
    fed = fa.Federation.from_arrays([(x, y), (x, y)], priority=[True, False], test_fraction=0.25)
    for client in fed.clients:
        parts = client.train, client.heldout, client.test
        assert [len(part) for part in parts] == [120, 30, 50]
        assert len(np.unique(np.concatenate(parts))) == 200
        assert fed.pool.y[client.test].sum() == 25
    with pytest.raises(fa.FedalignError, match="there is test data already"):
        fa.Federation.from_arrays([(x, y)], test=[(x, y)], priority=[True], test_fraction=0.25)


class Images(Dataset):
    def __init__(self, seed):
        self.draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(12, 3, 4, 4, generator=self.draw)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.x[i], ("cat", "dog")[i % 2]


def test_torch_datasets():
    fed = fa.Federation.from_clients({"a": Images(0), "b": Subset(Images(1), range(6))}, priority=["a"])
    assert fed.pool.classes == ("cat", "dog")
    assert torch.equal(fed.pool.x[:12], Images(0).x)
    x, y = torch.randn(9, 2), torch.arange(9) % 2
    tensors = fa.Federation.from_clients([TensorDataset(x, y), (x.numpy(), y.numpy())], priority=[True, False])
    assert torch.equal(tensors.pool.x, torch.cat([x, x]))


def test_hugging_face_and_flower_partitions():
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner").IidPartitioner(num_partitions=3)
    names = datasets.Features(
        {"ids": datasets.Sequence(datasets.Value("int64")), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    tokens = datasets.Dataset.from_dict({"ids": [[k, k + 1] for k in range(20)], "label": [0, 1] * 10}, features=names)
    halves = {"a": tokens.select(range(10)), "b": tokens.select(range(10, 20))}
    fed = fa.Federation.from_clients(halves, target="label", priority=["a"])
    assert fed.pool.x.tolist() == [[k, k + 1] for k in range(20)]
    assert fed.pool.classes == ("neg", "pos")
    both = datasets.DatasetDict(train=halves["a"], validation=tokens.select([1, 2]), test=halves["b"])
    split = fa.Federation.from_clients({"a": both, "b": both}, target="label", priority=["a"])
    assert [(len(c.train), len(c.heldout), len(c.test)) for c in split.clients] == [(10, 2, 10)] * 2
    table = datasets.Dataset.from_pandas(frame(0, 30))
    partitioner.dataset = table
    divided = fa.Federation.from_clients(partitioner, target="label", priority=["0"])
    assert divided.roster.names == ("0", "1", "2")
    assert len(divided.pool.y) == 30
    with pytest.raises(fa.FedalignError, match="column 'label' holds texts"):
        fa.Federation.from_clients({"a": table}, target="b", priority=["a"])


x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 3
FEATURES = {
    "reversed": x[::-1],
    "reversed columns": x[:, ::-1],
    "big-endian": x.astype(">f4"),
    "half": x.astype(np.float16),
    "long double": x.astype(np.longdouble),
    "booleans": x > 0,
    "int16": (9 * x).astype(np.int16),
    "big-endian ints": (9 * x).astype(">i4"),
    "uint16": np.abs(9 * x).astype(np.uint16),
    "objects": x.astype(object),
    "a frame": pd.DataFrame(x),
    "bfloat16": torch.tensor(x).bfloat16(),
}


@pytest.mark.parametrize("kind", list(FEATURES))
def test_unusual_arrays_are_copied_not_refused(kind):
    given = FEATURES[kind]
    fed = fa.Federation.from_arrays([(given, y), (given, y)], priority=[True, False])
    values = given.float().numpy() if isinstance(given, torch.Tensor) else np.asarray(given, float)
    assert np.allclose(fed.pool.x[:20].double().numpy(), values)
    result = fa.simulate(fed, lambda: torch.nn.Linear(3, 3), rounds=1)
    assert result.history[0].global_loss > 0


@pytest.mark.parametrize(
    "labels", [y[::-1], y.astype(np.uint16), y.astype(">i8"), y > 1, np.array(["c", "a", "b"])[y], pd.Series(y)]
)
def test_unusual_labels(labels):
    fed = fa.Federation.from_arrays([(x, labels)] * 2, priority=[True, False])
    as_numbers = np.unique(np.asarray(labels), return_inverse=True)[1]
    assert fed.pool.y[:20].tolist() == as_numbers.tolist()


def test_classes_are_those_of_all_clients():
    fed = fa.Federation.from_arrays([(x[:2], ["dog", "cat"]), (x[:2], ["ant", "dog"])], priority=[True, False])
    assert fed.pool.classes == ("ant", "cat", "dog")
    assert fed.pool.y.tolist() == [2, 1, 0, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fa.Federation.from_clients(FRAMES, priority=["s0"]), "needs a target: name its column"),
        (lambda: fa.Federation.from_clients(FRAMES, target="lable", priority=["s0"]), "did you mean 'label'"),
        (lambda: fa.Federation.from_clients(FRAMES, target="a", priority=["s0"]), "column 'label' holds str values"),
        (lambda: fa.Federation.from_clients(FRAMES, target="label", priority=["s9"]), "priority names 's9'"),
        (
            lambda: fa.Federation.from_clients(
                {**FRAMES, "s2": FRAMES["s2"].drop(columns="b")}, target="label", priority=["s0"]
            ),
            "client 's2' and client 's0' differ in column 'b'",
        ),
        (
            lambda: fa.Federation.from_clients(
                {**FRAMES, "s2": FRAMES["s2"].assign(a=np.nan)}, target="label", priority=["s0"]
            ),
            "column 'a' has 30 missing values",
        ),
        (lambda: fa.Federation.from_clients(FRAMES["s0"], target="label", priority=["s0"]), "needs client="),
        (lambda: fa.Federation.from_clients(Images(0), priority=[True]), "clients must be a mapping"),
        (lambda: fa.Federation.from_clients({"a": 5}, priority=["a"]), "int is no form of data"),
        (lambda: fa.Federation.from_clients({"a": {"tset": (x, y)}}, priority=["a"]), "there is a split 'tset'"),
        (lambda: fa.Federation.from_clients({"a": {"test": (x, y)}}, priority=["a"]), "no training samples"),
        (lambda: fa.Federation.from_clients({"a": "a.txt"}, priority=["a"]), "not a .csv or .parquet file"),
        (lambda: fa.Federation.from_clients({"a": "none.csv"}, target="y", priority=["a"]), "cannot read none.csv"),
        (lambda: fa.Federation.from_arrays([(x, y), (x, ["a"] * 20)], priority=[1, 0]), "some clients are texts"),
        (lambda: fa.Federation.from_arrays([(x.astype(str), y)], priority=[1]), "they hold texts, not numbers"),
        (lambda: fa.Federation.from_arrays([(x * 1j, y)], priority=[1]), "complex numbers"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(make, message):
    with pytest.raises(fa.FedalignError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_arrays_in_files_and_further_samples():
    for folder in ("d", "d/test"):
        Path(folder).mkdir()
    for name, priority in (("a", True), ("b", False)):
        np.savez(f"d/{name}.npz", x=x[::-1], y=np.array(["no", "yes", "may"])[y], priority=priority)
        np.savez(f"d/test/{name}.npz", x=x[:4], y=np.array(["no", "yes", "may"])[y[:4]])
    fed = fa.Federation.from_folder("d")
    assert fed.pool.classes == ("may", "no", "yes")
    assert fed.roster.priority == (True, False)
    assert [len(client.test) for client in fed.clients] == [4, 4]
    np.savez("d/test/c.npz", x=x, y=y)
    with pytest.raises(fa.FedalignError, match="belongs to no client"):
        fa.Federation.from_folder("d")


def test_several_targets_make_a_multi_label_task():
    table = frame().assign(first=1, second=0)
    fed = fa.Federation.from_clients(
        {"a": table, "b": table}, target=["first", "second"], features=["a", "b"], priority=["a"], test_fraction=0.2
    )
    assert fed.pool.y[0].tolist() == [1, 0]
    result = fa.simulate(fed, lambda: torch.nn.Linear(2, 2), rounds=5, loss="binary-cross-entropy")
    assert result.history[-1].test_accuracy == 1
