"""What crosses the wire: models by name, packed, rounded; caches that lose models; nodes that say so for no reason."""

import os
import shutil

import in_process
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from in_process import DATA, history, model, weights

import fedalign as fa
from fedalign.flower.model_cache import ModelCache, cache_folder, digest
from fedalign.flower.packing import Packing
from fedalign.flower.parcels import MissingModelError, Parcel, get_parcels, put_parcels
from fedalign.flower.settings import Settings
from fedalign.flower.shipping import _size

federation, keys = in_process.federation, in_process.keys
ALL = {"compress": True, "cache": True}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def frozen_model():
    module = torch.nn.Sequential(torch.nn.Linear(60, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 10))
    module[0].requires_grad_(False)
    return module


def simulated(rule, make=model):
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    return fa.simulate(DATA.federation(seed=0), make, rule, 5, 0.1, local, device="cpu")


def payloads(grid, k, kind=None):
    """Count the models that were really sent to a node, in messages of a kind or in all."""
    of_node = [m for m in grid.sent if m.metadata.dst_node_id == 100 + k and "models" in m.content]
    return sum(sum(m.content["models"]["sent"]) for m in of_node if kind in (None, m.metadata.message_type))


def bytes_sent(grid):
    return sum(record.count_bytes() for m in grid.sent for record in m.content.values())


def assert_alike(tmp_path, expected, atol=1e-5, name="out"):
    for mine, theirs in zip(history(tmp_path, name), expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        assert [t.admitted for t in mine.tried] == [t.admitted for t in theirs.tried]
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights(tmp_path, name)[key].to(value.dtype), value, atol=atol), key


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rule": "fedalign"}, fa.Align(0.6)),
        ({"rule": "auto"}, fa.AutoAlign()),
        ({"rule": "all", "trust": "verify"}, fa.Verified(fa.Everyone())),
        ({"rule": "auto", "compress": False}, fa.AutoAlign()),
        ({"rule": "auto", "cache": False}, fa.AutoAlign()),
    ],
)
def test_it_decides_and_learns_as_the_simulation(federation, tmp_path, settings, rule):
    grid, server = federation(**ALL | settings)
    server().run()
    assert_alike(tmp_path, simulated(rule))
    rounds = history(tmp_path)
    sent = sum(payloads(grid, k) for k in range(6))
    final = sum(sum(m.content["models"]["sent"]) for m in grid.sent[-6:])  # the last figures belong to no round
    assert sum(r.models_down for r in rounds) in (sent, sent - final)
    assert 0 < sum(r.bytes_down for r in rounds) <= bytes_sent(grid)
    assert sum(r.bytes_up for r in rounds) > sum(r.models_up for r in rounds) * 610


def test_a_model_is_sent_once(federation, tmp_path):
    grid, server = federation(rule="fedalign", warmup=0.0, **ALL)
    server().run()
    # The initial model is known. Later ones come with the measuring of a round's end, and are trained by name.
    assert payloads(grid, 0) == 5
    assert payloads(grid, 0, "train") == 0
    assert payloads(grid, 5, "train") == 4
    assert [r.models_down for r in history(tmp_path)][1:4] == [2 + 4] * 3
    assert [r.models_up for r in history(tmp_path)] == [
        sum(c.decision in ("trained", "admitted", "refused") for c in r.clients) for r in history(tmp_path)
    ]


@pytest.mark.parametrize("settings", [ALL, {"compress": False, "cache": False}])
def test_what_was_not_sent_to_a_busy_node_is_not_counted(federation, tmp_path, settings):
    grid, server = federation(rule="all", warmup=0.0, rounds=2, timeout=600.0, **settings)
    grid.delays = {(k, "train"): 10.0 for k in range(5)} | {(5, "train"): 1e9}
    made, counted, ends = server(grid.timer), [], [0]
    keep = made._keep

    def kept(done, seconds):
        keep(done, seconds)
        sent = [m.content for m in grid.sent[ends[-1] :] if "models" in m.content or "model" in m.content]
        models = sum(sum(content["models"]["sent"]) if "models" in content else 1 for content in sent)
        counted.append((models, sum(map(_size, sent))))
        ends.append(len(grid.sent))

    made._keep = kept
    made.run()
    rounds = history(tmp_path)
    assert rounds[1].clients[5].reason == "it is still busy with an earlier message"
    assert [(r.models_down, r.bytes_down) for r in rounds] == counted


def test_autoalign_sends_each_candidate_once(federation, tmp_path):
    grid, server = federation(rule="auto", warmup=0.0, **ALL)
    server().run()
    rounds = history(tmp_path)
    tried = sum(len(r.tried) for r in rounds)
    # Each candidate, the priority-only model of the later rounds, and a training model that was no candidate.
    assert tried + 4 <= payloads(grid, 0) <= tried + 4 + sum(r.base for r in rounds)
    assert payloads(grid, 0, "train") == 0


def test_a_node_that_has_lost_its_models_gets_them_again(federation, tmp_path, cache):
    _, server = federation(rule="auto", out=str(tmp_path / "whole"), **ALL)
    server().run()
    grid, server = federation(rule="auto", **ALL)
    lost = []

    def lose(reply, message):
        if message.metadata.message_type == "evaluate" and len(lost) < 2:
            shutil.rmtree(cache)
            lost.append(1)
        return reply

    grid.tamper[1] = lose
    server().run()
    assert len(lost) == 2
    assert history(tmp_path) == history(tmp_path, "whole")
    for key, value in weights(tmp_path, "whole").items():
        assert torch.equal(weights(tmp_path)[key], value)


def test_a_node_without_a_cache_is_soon_not_asked_to_have_one(federation, tmp_path):
    nodes = {k: {"partition-id": k, "cache-mb": 0} for k in range(6)}
    with_cache, server = federation(rule="fedalign", out=str(tmp_path / "with"), **ALL)
    server().run()
    grid, server = federation(nodes=nodes, rule="fedalign", **ALL)
    server().run()
    assert_alike(tmp_path, simulated(fa.Align(0.6)))
    least, most = (len([m for m in one.sent if m.metadata.dst_node_id == 100]) for one in (with_cache, grid))
    assert most == least + 3  # three times it had to be sent again


def test_one_that_always_asks_again_is_lost_and_costs_one_resend(federation, tmp_path):
    grid, server = federation(rule="all", warmup=0.0, rounds=3, **ALL)
    grid.tamper[5] = lambda reply, message: (
        reply
        if "samples" in reply.content
        else Message(RecordDict({"missing": ConfigRecord({"model": "x" * 100})}), reply_to=message)
    )
    server().run()
    assert {r.clients[5].decision for r in history(tmp_path)} == {"lost"}
    assert history(tmp_path)[0].clients[5].reason == "it lost the models of a message twice"
    asked = [m for m in grid.sent if m.metadata.dst_node_id == 105 and m.metadata.message_type == "train"]
    assert len(asked) == 2 * 3
    assert payloads(grid, 5, "train") <= 1 + 2 * 2 + 1


@pytest.mark.parametrize("transport", ["bfloat16", "float16"])
def test_16_bits_are_close_and_half_as_large(federation, tmp_path, transport):
    _, server = federation(rule="fedalign", out=str(tmp_path / "exact"), compress=False, cache=True)
    server().run()
    _, server = federation(rule="fedalign", transport=transport, compress=False, cache=True)
    server().run()
    exact, rounded = history(tmp_path, "exact"), history(tmp_path)
    for one, other in zip(exact[1:], rounded[1:], strict=True):
        assert [c.decision for c in one.clients] == [c.decision for c in other.clients]
        assert (one.models_down, one.models_up) == (other.models_down, other.models_up)
        assert other.bytes_up < 0.7 * one.bytes_up  # the rest are names and measures
    first, second = (torch.cat([t.flatten() for t in weights(tmp_path, name).values()]) for name in ("exact", "out"))
    assert 0 < (first - second).norm() < 0.02 * first.norm()


@pytest.mark.parametrize("compress", [True, False])
def test_frozen_weights_stay_at_home(federation, tmp_path, compress):
    settings = {"model": "test_shipping:frozen_model", "rule": "all", "cache": True, "compress": compress}
    grid, server = federation(**settings)
    server().run()
    assert_alike(tmp_path, simulated(fa.Everyone(), frozen_model))
    arrays = [m.content["model"]["packed"].data for m in grid.sent if "model" in m.content]
    assert arrays
    assert max(map(len, arrays)) < 4 * (30 * 10 + 10 + 5 * 30) + 300  # of 2300 numbers, 1830 are frozen


def test_a_hostile_packed_update_is_refused(federation, tmp_path):
    def cut(reply, message):
        if "model" in reply.content:
            array = reply.content["model"]["packed"]
            array.data = array.data[:-3]
            reply.content["model"] = ArrayRecord({"packed": array})
        return reply

    grid, server = federation(rule="all", warmup=0.0, rounds=2, **ALL)
    grid.tamper[5] = cut
    server().run()
    assert {c.decision for r in history(tmp_path) for c in r.clients[5:]} == {"refused"}
    assert "bytes of models" in history(tmp_path)[0].clients[5].reason


def test_a_resume_ends_as_an_undisturbed_run(federation, tmp_path):
    _, server = federation(rule="auto", out=str(tmp_path / "whole"), **ALL)
    server().run()
    grid, server = federation(rule="auto", **ALL)
    trained = []
    grid.tamper[1] = lambda reply, message: (
        None if message.metadata.message_type == "train" and trained.append(1) is None and len(trained) > 3 else reply
    )
    with pytest.raises(fa.FedalignError, match="paused"):
        server().run()
    _, again = federation(rule="auto", resume=str(tmp_path / "out"), compress=True, cache=False)
    again().run()
    assert history(tmp_path) == history(tmp_path, "whole")
    for key, value in weights(tmp_path, "whole").items():
        assert torch.equal(weights(tmp_path)[key], value)


def test_the_cache_is_limited_and_private(tmp_path):
    folder = tmp_path / "deep" / "models"
    cache = ModelCache(folder, limit=2500)
    models = [torch.full((250,), float(i)) for i in range(4)]
    for one in models:
        cache.put(digest(one), one)
    found = [cache.get(digest(one), torch.float32) for one in models]
    assert [one is not None for one in found] == [False, False, True, True]
    assert torch.equal(found[3], models[3])
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / digest(models[3])).write_bytes(bytes(1000))  # damaged
    assert cache.get(digest(models[3]), torch.float32) is None
    cache.put(digest(torch.zeros(1000)), torch.zeros(1000))  # larger than the cache
    assert len(list(folder.iterdir())) == 1
    assert ModelCache(tmp_path / "none", limit=0).get("0" * 64, torch.float32) is None
    (tmp_path / "file").write_text("")
    ModelCache(tmp_path / "file" / "models", limit=2500).put(digest(models[0]), models[0])  # cannot be made
    assert cache_folder({"CACHE_DIRECTORY": "/var/cache/a:/b"}).as_posix() == "/var/cache/a/models"


def test_no_file_outside_the_cache_is_read_or_removed(tmp_path):
    cache = ModelCache(tmp_path / "cache", limit=10_000)
    cache.put(digest(torch.ones(3)), torch.ones(3))  # makes the folder
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(12))
    packing = Packing.of(Settings.read({"model": "in_process:model", "data": "in_process:data"}))
    for name in (str(victim), "../victim", "cache/../../victim", "A" * 64, "0" * 64 + "\n", ".", ""):
        assert cache.get(name, torch.float32) is None
        cache.put(name, torch.ones(3))
        for parcel in (Parcel(name), Parcel("0" * 64, base=name, data=b"")):
            content = RecordDict()
            put_parcels(content, [parcel])
            if parcel.name == name or name:  # a model without a base has an empty one
                with pytest.raises(fa.FedalignError, match="by something else than its SHA-256"):
                    get_parcels(content, packing, cache)
    assert victim.read_bytes() == bytes(12)
    assert [path.name for path in cache._folder.iterdir()] == [digest(torch.ones(3))]
    content = RecordDict()
    put_parcels(content, [Parcel("0" * 64)])
    with pytest.raises(MissingModelError):  # a digest that no file has
        get_parcels(content, packing, cache)


def test_only_regular_files_within_the_limit_are_read(tmp_path):
    cache = ModelCache(tmp_path, limit=1000)
    model = torch.ones(100)
    kept = tmp_path.parent / "elsewhere"
    cache.put(digest(model), model)
    (tmp_path / digest(model)).rename(kept)
    (tmp_path / digest(model)).symlink_to(kept)
    assert cache.get(digest(model), torch.float32) is None
    cache.put(digest(model), model)  # in place of the link
    assert torch.equal(cache.get(digest(model), torch.float32), model)
    assert kept.exists()
    (tmp_path / ("1" * 64)).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / ("2" * 64))
    (tmp_path / ("3" * 64)).write_bytes(bytes(1001))
    (tmp_path / ("4" * 64)).mkdir()
    for digit in "1234":
        assert cache.get(digit * 64, torch.float32) is None
        assert os.path.lexists(tmp_path / (digit * 64))
    cache.put(digest(torch.ones(3)), torch.ones(3))
    assert cache.get(digest(torch.ones(3)), torch.float64) is None  # 12 bytes are no float64
