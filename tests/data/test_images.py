"""Image data sets in their real formats, as tiny files made here, and every way in which a file can be bad."""

import dataclasses
import errno
import gzip
import hashlib
import http.server
import io
import pickle
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import requests

from fedalign.cli import main
from fedalign.data import catalogue, download, image_sets, images
from fedalign.data.idx import read_idx_folder
from fedalign.data.source import Remote, Splits, check_splits
from fedalign.errors import FedalignError

pytestmark = pytest.mark.pictures

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def idx(array):
    head = b"\x00\x00\x08" + bytes([array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return head + array.astype(np.uint8).tobytes()


def tiny_idx(classes=10, train=24, test=6, side=28):
    """Make so many samples of each class: contents by file name."""
    draw = np.random.default_rng(0)
    labels, test_labels = (draw.permutation(np.repeat(np.arange(classes), n)) for n in (train, test))
    pictures = [draw.integers(0, 256, (len(y), side, side)) for y in (labels, test_labels)]
    return dict(zip(NAMES, (idx(pictures[0]), idx(labels), idx(pictures[1]), idx(test_labels)), strict=True))


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    monkeypatch.setenv("FEDALIGN_DATA", str(folder))
    images._pool.cache_clear()
    yield folder
    images._pool.cache_clear()


def install(monkeypatch, name, kind, **changes):
    """Put a tiny data set in the place of a real one."""
    source = dataclasses.replace(image_sets.SOURCES[name], **changes)
    monkeypatch.setitem(image_sets.SOURCES, name, source)
    monkeypatch.setitem(catalogue.DATASETS, name, catalogue.Downloadable(source))
    monkeypatch.setattr(kind, "source", source)
    return source


@pytest.fixture
def fmnist(data, monkeypatch):
    contents = tiny_idx()
    install(
        monkeypatch,
        "fmnist",
        images.FashionMnist,
        counts=(240, 60),
        md5={name: md5(content) for name, content in contents.items()},
    )
    folder = data / "fashion-mnist"
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


SMALL = ["--set", "data.clients=6", "--set", "data.shard_size=10", "--seeds", "1", "--rounds", "2", "--quiet"]


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_an_experiment_on_images(fmnist, tmp_path, capsys):
    assert run("run", "fmnist", *SMALL, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "incentive.png").is_file()
    clients = (tmp_path / "out" / "local" / "seed-0" / "clients.json").read_text()
    assert clients.count("test_accuracy") == 6
    assert run("list") == 0
    assert "available in" in capsys.readouterr().out
    assert run("data", "check", "fmnist") == 0


@pytest.mark.parametrize("form", ["plain", "gzipped again"])
def test_the_content_counts_not_the_packing(fmnist, form):
    for path in list(fmnist.iterdir()):
        content = gzip.decompress(path.read_bytes())
        if form == "plain":
            path.unlink()
            path.with_suffix("").write_bytes(content)
        else:
            path.write_bytes(gzip.compress(content, compresslevel=1, mtime=12345))
    assert len(image_sets.SOURCES["fmnist"].load().y) == 240


def spoil(path, how, folder):
    raw = path.read_bytes()
    content = gzip.decompress(raw)
    if how == "cut off":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped bit":
        path.write_bytes(gzip.compress(content[:-1] + bytes([content[-1] ^ 1])))
    elif how == "damaged packing":
        path.write_bytes(raw[:40] + bytes([raw[40] ^ 255]) + raw[41:])
    elif how == "too short inside":
        path.write_bytes(gzip.compress(content[:-7]))
    elif how == "not idx":
        path.write_bytes(b"<html>Not found</html>")
    elif how == "swapped":
        other = folder / "train-labels-idx1-ubyte.gz"
        path.write_bytes(other.read_bytes())
        other.write_bytes(raw)
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut off", "is damaged or incomplete"),
        ("empty", "is not an idx file"),
        ("flipped bit", "does not hold the official content of Fashion-MNIST"),
        ("damaged packing", "damaged|official content|not an idx file"),
        ("too short inside", "must hold 240 × 28 × 28 bytes"),
        ("not idx", "is not an idx file"),
        ("swapped", "holds labels, not images: were the files swapped"),
        ("missing", "fedalign data get fmnist"),
    ],
)
def test_bad_files_are_one_sentence(fmnist, tmp_path, capsys, how, message):
    spoil(fmnist / "train-images-idx3-ubyte.gz", how, fmnist)
    for command in (["run", "fmnist", *SMALL, "--out", tmp_path / "out"], ["data", "check", "fmnist"]):
        assert run(*command) == 2
        said = capsys.readouterr().err
        assert how == "missing" or __import__("re").search(message, said), said
        assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_missing_data_points_to_other_files(data, capsys, tmp_path):
    other = data / "emnist47-redrawn"
    other.mkdir(parents=True)
    (other / "some-train-images-idx3-ubyte.gz").write_bytes(b"")
    assert run("run", "emnist", *SMALL, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "fedalign data get emnist" in said
    assert "--set data.folder=emnist47-redrawn" in said


def test_labels_and_images_of_unlike_number(fmnist, capsys):
    contents = tiny_idx(train=20)
    (fmnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(contents["train-labels-idx1-ubyte"]))
    with pytest.raises(FedalignError, match="official content"):
        image_sets.SOURCES["fmnist"].load()
    with pytest.raises(FedalignError, match="240 training images and 200 labels"):
        images.Idx(folder=str(fmnist), clients=2, shards=1).federation(0)


def test_other_idx_files_are_a_data_set(data, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in tiny_idx(classes=12, side=28).items():
        (folder / f"mine-{name.replace('t10k', 'test')}.gz").write_bytes(gzip.compress(content))
    toml = tmp_path / "mine.toml"
    toml.write_text(
        '[data]\nkind = "idx"\nclients = 4\npriority = 1\nshards = 3\n[model]\nkind = "logistic"\ninputs = 784\n'
        "classes = 12\n[local]\nlr = 0.01\nepochs = 1\n"
    )
    assert run("run", toml, "--rounds", 1, "--seeds", 1, "--quiet", "--out", tmp_path / "no") == 2
    assert "data.folder must name" in capsys.readouterr().err
    more = ["--set", f"data.folder={folder}"]
    assert run("run", toml, "--rounds", 1, "--seeds", 1, "--quiet", "--out", tmp_path / "yes", *more) == 0
    assert run("data", "show", toml, *more, "--out", tmp_path / "shown") == 0
    assert (tmp_path / "shown" / "mine-seed-0.png").stat().st_size > 10_000
    with pytest.raises(FedalignError, match="there is no folder"):
        read_idx_folder(tmp_path / "nowhere")
    (folder / "mine-test-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FedalignError, match="no idx file of test labels"):
        read_idx_folder(folder)


def test_emnist_in_its_archive_and_upright(data, monkeypatch):
    contents = tiny_idx(classes=47, train=4, test=2)
    install(monkeypatch, "emnist", images.Emnist, counts=(188, 94))
    folder = data / "emnist"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for name, content in contents.items():
            name = f"gzip/emnist-balanced-{name.replace('t10k', 'test')}.gz"
            archive.writestr(name, gzip.compress(content))
    zipped = image_sets.SOURCES["emnist"].load()
    raw = np.frombuffer(contents[NAMES[0]], np.uint8, offset=16).reshape(-1, 28, 28)
    assert np.array_equal(zipped.x, raw)
    settings = images.Emnist(clients=4, shards=3)
    pool, _ = settings.pool()
    assert np.array_equal(pool.x[0, 0].numpy(), raw[0].T)
    damaged = (folder / "gzip.zip").read_bytes()
    (folder / "gzip.zip").write_bytes(damaged[:-200])
    with pytest.raises(FedalignError, match=r"gzip\.zip is damaged"):
        image_sets.SOURCES["emnist"].load()
    (folder / "gzip.zip").unlink()
    for name, content in contents.items():
        (folder / f"emnist-balanced-{name.replace('t10k', 'test')}.gz").write_bytes(gzip.compress(content))
    assert np.array_equal(image_sets.SOURCES["emnist"].load().x, zipped.x)


def cifar_records(each=8):
    draw = np.random.default_rng(1)
    found = {}
    for batch in BATCHES:
        labels = draw.permutation(np.arange(each * 10) % 10).astype(np.uint8)
        found[batch] = (labels, draw.integers(0, 256, (each * 10, 3072), dtype=np.uint8))
    return found


def binary(labels, pixels):
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


def pickled(labels, pixels):
    return pickle.dumps({b"labels": labels.tolist(), b"data": pixels, b"batch_label": b"x"}, protocol=2)


def packed(path, inner, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"{inner}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def cifar(data, monkeypatch):
    records = cifar_records()
    install(
        monkeypatch,
        "cifar10",
        images.Cifar10,
        counts=(400, 80),
        md5={batch: md5(binary(*pair)) for batch, pair in records.items()},
    )
    folder = data / "cifar-10"
    folder.mkdir(parents=True)
    return folder, records


@pytest.mark.parametrize("form", ["bin", "bin folder", "bin archive", "py", "py folder", "py archive"])
def test_cifar10_in_all_its_forms(cifar, form):
    folder, records = cifar
    contents = (
        {f"{b}.bin": binary(*pair) for b, pair in records.items()}
        if form.startswith("bin")
        else {b: pickled(*pair) for b, pair in records.items()}
    )
    inner = "cifar-10-batches-bin" if form.startswith("bin") else "cifar-10-batches-py"
    if form.endswith("archive"):
        packed(folder / f"cifar-10-{'binary' if form.startswith('bin') else 'python'}.tar.gz", inner, contents)
    else:
        target = folder / inner if form.endswith("folder") else folder
        target.mkdir(exist_ok=True)
        for name, content in contents.items():
            (target / name).write_bytes(content)
    loaded = image_sets.SOURCES["cifar10"].load()
    assert np.array_equal(loaded.y[:80], records["data_batch_1"][0])
    assert np.array_equal(loaded.x_test.reshape(80, -1), records["test_batch"][1])


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_2.bin", lambda r: binary(*r["data_batch_2"])[:-5], "not a whole number of 3073-byte records"),
        (
            "data_batch_2.bin",
            lambda r: binary(*r["data_batch_3"]),
            "data_batch_2.bin does not hold the official content of CIFAR-10",
        ),
        ("test_batch.bin", lambda r: b"", "not a whole number"),
        ("data_batch_1", lambda r: pickle.dumps(Evil()), "it refers to builtins.print"),
        ("data_batch_1", lambda r: pickled(*r["data_batch_1"])[:-50], "is not a CIFAR-10 batch"),
        ("data_batch_1", lambda r: pickle.dumps([1, 2]), "is not a CIFAR-10 batch"),
    ],
)
def test_bad_cifar10_files(cifar, capsys, name, content, message):
    folder, records = cifar
    for batch, pair in records.items():
        own, form = (batch, pickled) if name == "data_batch_1" else (f"{batch}.bin", binary)
        (folder / own).write_bytes(form(*pair))
    (folder / name).write_bytes(content(records))
    assert run("data", "check", "cifar10") == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert "this must not run" not in seen.out


class Server(http.server.BaseHTTPRequestHandler):
    """Serves files from a table, from any byte on; some break off, some are missing."""

    contents: dict[str, bytes]
    limit: int | None
    asked: list[tuple[str, str | None]]

    def do_GET(self):
        name, wanted = self.path.rsplit("/", 1)[1], self.headers.get("Range")
        type(self).asked.append((self.path, wanted))
        if name not in self.contents or self.path.startswith("/down/"):
            self.send_error(404)
            return
        content = self.contents[name]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content) if type(self).limit is None else start + type(self).limit
        self.wfile.write(content[start:end])

    def log_message(self, *arguments):
        """Be quiet."""


@pytest.fixture
def server(monkeypatch):
    Server.contents, Server.limit, Server.asked = {}, None, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.fixture
def remote(server, data, monkeypatch):
    contents = {f"{name}.gz": gzip.compress(content) for name, content in tiny_idx().items()}
    Server.contents = contents
    return install(
        monkeypatch,
        "fmnist",
        images.FashionMnist,
        counts=(240, 60),
        md5={},
        remotes=tuple(
            Remote(name, md5(content), (f"{server}/down/{name}", f"{server}/up/{name}"))
            for name, content in contents.items()
        ),
    )


def test_download_from_a_mirror(remote, capsys):
    assert run("data", "get", "fmnist") == 0
    assert sorted(p.name for p in remote.place().iterdir()) == sorted(Server.contents)
    Server.asked.clear()
    assert run("data", "get", "fmnist") == 0
    assert not Server.asked


def test_a_broken_download_is_resumed(remote, capsys):
    Server.limit = 40_000
    assert run("data", "get", "fmnist") == 2
    assert "run the same command again to resume" in capsys.readouterr().err
    (part,) = remote.place().glob("*.part")
    had = part.stat().st_size
    assert had > 0
    Server.limit = None
    Server.asked.clear()
    assert run("data", "get", "fmnist") == 0
    ranges = [wanted for path, wanted in Server.asked if path.startswith("/up/") and part.name[:-5] in path]
    assert ranges == [f"bytes={had}-"]
    assert not list(remote.place().glob("*.part"))


def test_a_download_with_a_wrong_checksum_is_deleted(remote, capsys):
    name = next(iter(Server.contents))
    Server.contents[name] = b"something else"
    assert run("data", "get", "fmnist") == 2
    assert "its checksum is wrong" in capsys.readouterr().err
    assert not (remote.place() / name).exists()
    assert not list(remote.place().glob("*.part"))


def test_offline_says_which_files_to_put_where(remote, capsys, monkeypatch):
    def offline(*arguments, **options):
        raise requests.ConnectionError("no route to host")

    monkeypatch.setattr(requests, "get", offline)
    assert run("data", "get", "fmnist") == 2
    said = capsys.readouterr().err.replace("\n", "")
    assert "train-images-idx3-ubyte.gz" in said
    assert remote.remotes[0].md5 in said
    assert str(remote.place()) in said


def test_a_full_disk_leaves_nothing_behind(remote, capsys, monkeypatch):
    class Full(io.BytesIO):
        def write(self, piece):
            raise OSError(errno.ENOSPC, "No space left on device")

    original = download.Path.open

    def open_(self, mode="r", *more, **options):
        if self.suffix == ".part" and "b" in mode:
            original(self, mode, *more, **options).close()
            return Full()
        return original(self, mode, *more, **options)

    monkeypatch.setattr(download.Path, "open", open_)
    assert run("data", "get", "fmnist") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(remote.place().iterdir())


def test_a_folder_that_cannot_be_created(remote, data, capsys):
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("a file where the folder should be")
    assert run("data", "get", "fmnist") == 2
    assert "set FEDALIGN_DATA to another" in capsys.readouterr().err


def test_settings_are_checked():
    for bad, message in (
        ({"priority": 61}, "data.priority is 61"),
        ({"clients": 0}, "data.clients must be at least 1"),
        ({"samples": 1}, "data.samples must be at least 2"),
        ({"partition": "sizes", "sizes": [1, 2]}, "a number for each of the 60 clients"),
        ({"partition": "odd"}, "data.partition must be"),
        ({"heldout_fraction": 1.0}, "data.heldout_fraction"),
    ):
        with pytest.raises(FedalignError, match=message):
            images.FashionMnist(**bad)


def test_splits_that_do_not_match():
    x, y = np.zeros((3, 2, 2), np.uint8), np.array([0, 1, 2], np.uint8)
    with pytest.raises(FedalignError, match="label 2, but there are 2 classes"):
        check_splits(Splits(x, y, x, y), 2, images.Path("here"))
    with pytest.raises(FedalignError, match="test images"):
        check_splits(Splits(x, y, x[:, :1], y), 3, images.Path("here"))
