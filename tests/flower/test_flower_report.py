"""A run over Flower has the records, clients.json, summary.json and report of a simulation, with the same numbers."""

import json
from dataclasses import replace

import in_process
import pytest
from flwr.app import Error, Message
from in_process import DATA, history, model

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.recorder import client_rows
from fedalign.experiments.summary import summarise
from fedalign.report.follow import FollowedRun
from fedalign.report.page_data import page_data
from fedalign.report.read_runs import read_run

federation, keys = in_process.federation, in_process.keys
FIGURES = ("train_loss", "test_loss", "test_accuracy", "heldout_loss", "heldout_accuracy", "global_loss", "samples")


def simulated(rule, data=None):
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    return fa.simulate(data or DATA.federation(seed=0), model, rule, 5, 0.1, local, device="cpu")


@pytest.mark.parametrize(("name", "rule"), [("fedalign", fa.Align(0.6)), ("auto", fa.AutoAlign())])
def test_the_numbers_are_those_of_the_simulation(federation, tmp_path, name, rule):
    _, server = federation(rule=name)
    server().run()
    expected, out = simulated(rule), tmp_path / "out"
    for mine, theirs in zip(history(tmp_path), expected.history.rounds, strict=True):
        assert mine.train_loss is not None
        assert mine.samples > 0
        for figure in FIGURES:
            assert getattr(mine, figure) == pytest.approx(getattr(theirs, figure), abs=1e-5), figure
    rows = json.loads((out / "clients.json").read_text())
    wanted = client_rows(DATA.federation(seed=0).clients, expected)
    assert len(rows) == len(wanted) == 6
    for mine, theirs in zip(rows, wanted, strict=True):
        assert mine == {**theirs, "name": f"site-{mine['id']}"} | {
            key: pytest.approx(theirs[key], abs=1e-5) for key in ("test_loss", "test_accuracy")
        }
    summary = json.loads((out / "summary.json").read_text())
    figures = summarise({name: {0: expected.history}}, {}, set())[name]
    assert (summary["experiment"], summary["rounds"], summary["seeds"], summary["device"]) == ("out", 5, [0], "cpu")
    assert summary["seconds"] > 0
    assert "unfinished" not in summary
    assert list(summary["arms"]) == [name]
    for key, value in figures.items():
        if isinstance(value, dict) and "mean" in value:
            assert summary["arms"][name][key]["mean"] == pytest.approx(value["mean"], abs=1e-5), key
        elif key != "models_down":  # nodes that keep models need fewer
            assert summary["arms"][name][key] == pytest.approx(value), key
    page = (out / "report.html").read_text()
    assert "site-5" not in page  # the data are compressed into one text
    assert f"{name}: " in page


def without_test(node_config):
    from fedalign.flower import ClientData

    parts = in_process.arrays_of(DATA.federation(seed=0), int(node_config["partition-id"]))
    return ClientData(**parts | {"test": None})


def test_without_test_data_the_figures_are_on_heldout_data(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(in_process, "data", without_test)
    grid, server = federation(rule="all")
    server().run()
    whole = DATA.federation(seed=0)
    arrays = [in_process.arrays_of(whole, k) for k in range(6)]
    data = fa.Federation.from_arrays(
        [one["train"] for one in arrays], [one["heldout"] for one in arrays], priority=[True] * 2 + [False] * 4
    )
    for mine, theirs in zip(history(tmp_path), simulated(fa.Everyone(), data).history.rounds, strict=True):
        assert mine.test_loss is None
        for figure in ("train_loss", "heldout_loss", "heldout_accuracy"):
            assert getattr(mine, figure) == pytest.approx(getattr(theirs, figure), abs=1e-5), figure
    assert not (tmp_path / "out" / "clients.json").exists()
    kinds = [message.metadata.message_type for message in grid.sent if message.metadata.dst_node_id == 100]
    assert kinds == ["query.hello", "evaluate"] + ["train", "evaluate"] * 5


def test_a_priority_client_that_is_lost_at_the_end_of_a_round_is_asked_once(federation, tmp_path):
    grid, server = federation(rule="all", rounds=1, quorum=0.3)

    def silent(reply, message):
        asked = str(message.content["task"].get("split", ""))
        return Message(Error(5, "gone"), reply_to=message) if asked.startswith("test+") else reply

    grid.tamper[1] = silent
    server().run()
    (record,) = history(tmp_path)
    assert record.train_loss is not None
    asked = [m.content["task"]["split"] for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert "train" not in asked


def test_a_report_at_any_time(federation, tmp_path, capsys):
    _, server = federation(rule="fedalign")
    server().run()
    out = tmp_path / "out"
    after = FollowedRun(out).read()
    assert after == read_run(out)
    for name in ("summary.json", "report.html", "clients.json", "model.safetensors", "checkpoint.safetensors"):
        (out / name).unlink()
    lines = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rounds.jsonl").write_bytes(b"".join(lines[:3]))
    followed = FollowedRun(out)
    mark, during = followed.mark(), followed.read()
    assert len(during.histories["fedalign"][0]) == 3
    assert during.summary["unfinished"]
    (out / "status.json").write_text("another heartbeat")
    assert followed.mark() == mark
    (out / "rounds.jsonl").write_bytes(b"".join(lines[:4]))
    assert followed.mark() != mark
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr()
    assert "fedalign" in said.out
    assert "4 of 5 rounds" in said.err
    assert (out / "report.html").exists()
    (out / "rounds.jsonl").unlink()
    assert main(["report", str(out)]) == 2
    assert "without any round" in capsys.readouterr().err
    assert FollowedRun(out).read().summary["arms"]["fedalign"]["test_loss"]["mean"] is None


def test_a_report_that_fails_leaves_the_run_whole(federation, tmp_path, monkeypatch, caplog):
    def broken(runs, folder):
        raise fa.FedalignError("no ink")

    monkeypatch.setattr("fedalign.flower.run_report.write_report", broken)
    _, server = federation(rule="all", rounds=1)
    with caplog.at_level("WARNING", logger="flwr"):
        server().run()
    assert "the report was not written: no ink; try again with: fedalign report" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"


def test_a_continued_run_has_a_new_summary(federation, tmp_path):
    _, server = federation(rule="all", rounds=3, callbacks="early-stopping(metric='test_accuracy', goal=0.0)")
    server().run()
    out = tmp_path / "out"
    first = json.loads((out / "summary.json").read_text())
    assert first["arms"]["all"]["stopped"]
    (out / "model.safetensors").unlink()
    more = {"resume": str(out), "continue_stopped": True, "callbacks": ""}
    config = (out / "config.toml").read_text().replace('callbacks = "early', 'callbacks = "" # "early')
    (out / "config.toml").write_text(config)
    _, server = federation(rule="all", rounds=3, **more)
    server().run()
    second = json.loads((out / "summary.json").read_text())
    assert second["arms"]["all"]["stopped"] == {}
    assert second["seconds"] > first["seconds"]
    assert second["arms"]["all"]["test_loss"] != first["arms"]["all"]["test_loss"]


@pytest.mark.parametrize("rounds", [3, 5])
def test_clients_that_join_later_are_in_the_report(federation, tmp_path, rounds):
    _, server = federation(rule="all", warmup=0.0)
    server().run()
    out = tmp_path / "out"
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for line in lines[:2]:  # as if the last two had joined for the third round
        del line["clients"][4:]
    (out / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:rounds]))
    for name in ("summary.json", "checkpoint.safetensors"):
        (out / name).unlink()
    run = read_run(out)
    record = run.histories["all"][0].rounds[0]
    assert [c.decision for c in record.clients[4:]] == ["absent"] * 2
    assert record.clients[5].reason == "it had not joined yet"
    (data,) = page_data([run])["runs"][0]["arms"][0]["seeds"]
    assert [c["decisions"] for c in data["clients"]] == ["t" * rounds] * 2 + ["a" * rounds] * 2 + [
        "--" + "a" * (rounds - 2)
    ] * 2
    assert FollowedRun(out).read() == replace(run, missing=())
    assert main(["report", str(out)]) == 0


def test_metrics_are_in_the_summary_and_in_the_report(federation, tmp_path):
    _, server = federation(rule="all", metrics="f1")
    server().run()
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    expected = fa.simulate(
        DATA.federation(seed=0), model, fa.Everyone(), 5, 0.1, local, device="cpu", metrics={"f1": "f1"}
    )
    figures = summarise({"all": {0: expected.history}}, {}, set())["all"]["metrics"]["f1"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]["all"]["metrics"]["f1"]
    for part in ("priority", "free"):
        assert summary[part]["mean"] == pytest.approx(figures[part]["mean"], abs=1e-5)
    assert summary["priority_pooled"]["mean"] is None  # outputs stay with the clients
    assert "f1" in (tmp_path / "out" / "report.html").read_text()
    measures = [m["key"] for m in page_data([read_run(tmp_path / "out")])["measures"]]
    assert {"f1.priority", "f1.free", "train_loss"} <= set(measures)
