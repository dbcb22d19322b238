"""MLflow's database and W&B's files, read back by their own readers, hold the numbers of ``rounds.jsonl``."""

import csv
import io
import json
import math
import shutil
import struct
import time
import tomllib
import warnings

import pytest
import torch
from conftest import federation, interrupted_before, linear
from safetensors.torch import load_file

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.tracking.tracker import curves_of

RUN = ["run", "synth-low", "--arms", "fedalign", "--seeds", "1", "--rounds", "6", "--quiet", "--device", "cpu"]
RUN += ["--set", "data.samples=30", "--set", 'metrics=["f1", "recall(average=\'none\')"]']
LOCAL = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


def mlflow_run(database, experiment="synth-low"):
    """Read an experiment's only run with MLflow's own client: the run, and its metrics as steps and values."""
    mlflow = pytest.importorskip("mlflow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{database}")
        (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        metrics = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return run, {key: sorted((one.step, one.value) for one in history) for key, history in metrics.items()}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Run an experiment that MLflow tracks in its usual place, the output folder."""
    pytest.importorskip("mlflow")
    out = tmp_path_factory.mktemp("tracked") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main([*RUN, "--track", "mlflow", "--out", str(out)]) == 0
    return out


def expected(records):
    """The points of all curves, from the records; what is not finite is left out."""
    points = {}
    for record in records:
        for name, value in curves_of(record).items():
            if math.isfinite(value):
                points.setdefault(name, []).append((record.round, value))
    return points


def wandb_records(folder):
    """Read a W&B file: blocks as in LevelDB's log, which hold messages of W&B's protocol."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("*.wandb")
    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its end
            record = protocol.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def wait_for_the_end(folder):
    """Wait until W&B's own process, which writes the file, has written the end of the run."""
    until = time.monotonic() + 120
    while not any(record.WhichOneof("record_type") == "exit" for record in wandb_records(folder)):
        assert time.monotonic() < until, "W&B did not write the end of the run"
        time.sleep(0.2)


def wandb_curves(folder):
    points = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith(("_", "decisions", "run/")) and isinstance(value, int | float):
                    points.setdefault(name, []).append((items["_step"], value))
    return points


@pytest.mark.slow
def test_mlflow_has_the_records_numbers(tracked):
    out = tracked
    run, points = mlflow_run(out / "mlflow.db")
    store = RunStore(out / "fedalign" / "seed-0")
    records = store.history().rounds
    assert points == expected(records)
    assert points["metric/f1.priority"] == [(r.round, r.metrics["f1"].priority) for r in records]
    assert points["round/test_accuracy"] == [(r.round, r.test_accuracy) for r in records]
    assert points["clients/admitted"] == [(r.round, r.admitted) for r in records]
    assert (run.info.run_name, run.info.status) == ("fedalign/seed-0", "FINISHED")
    assert run.data.params["local.lr"] == "0.1"
    assert run.data.params["arm"] == "fedalign"
    assert run.data.tags["outcome"] == "finished after 6 rounds"
    (files,) = (out / "mlflow-files").glob("*/artifacts")
    assert {p.name for p in files.iterdir()} == {"config.toml", "decisions.csv", "run.png", "model.safetensors"}
    written = tomllib.loads((files / "config.toml").read_text())
    stored = tomllib.loads((out / "config.toml").read_text())
    assert {**written, "device": "cpu"} == stored
    weights = load_file(files / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(store.model).items())
    rows = list(csv.DictReader(io.StringIO((files / "decisions.csv").read_text())))
    told = [(str(r.round), c.name, c.decision, c.reason) for r in records for c in r.clients]
    assert [(row["round"], row["name"], row["decision"], row["reason"]) for row in rows] == told


@pytest.mark.slow
def test_mlflow_goes_on_after_an_interruption(tracked, tmp_path, monkeypatch):
    out, database = tmp_path / "out", tmp_path / "all.db"
    for path in (database, tmp_path / "other.db"):
        shutil.copy(tracked / "mlflow.db", path)  # one with its tables: to make them takes seconds
    settings = [*RUN, "--track", f"mlflow(uri='sqlite:///{database}', experiment='mine')", "--out", str(out)]
    with interrupted_before(monkeypatch, 3):
        assert main(settings) == 130
    run, points = mlflow_run(database, "mine")
    assert run.info.status == "KILLED"
    assert [step for step, _ in points["round/test_accuracy"]] == [0, 1, 2]
    assert main([*settings, "--resume"]) == 0
    run, points = mlflow_run(database, "mine")
    assert run.info.status == "FINISHED"
    assert points == expected(RunStore(out / "fedalign" / "seed-0").history().rounds)
    # A tracker may be added later: it gets all rounds.
    other = f"mlflow(uri='sqlite:///{tmp_path / 'other.db'}', experiment='mine')"
    (out / "fedalign" / "seed-0" / "model.safetensors").unlink()
    assert main([*RUN, "--track", other, "--out", str(out), "--resume"]) == 0
    assert mlflow_run(tmp_path / "other.db", "mine")[1] == points


@pytest.mark.slow
def test_wandb_offline_has_the_records_numbers(tmp_path):
    pytest.importorskip("wandb")
    result = fa.simulate(
        federation(),
        linear,
        fa.Align(0.3),
        5,
        0,
        LOCAL,
        device="cpu",
        metrics=["f1"],
        track=["wandb"],
        out=tmp_path / "a",
    )
    (folder,) = (tmp_path / "a" / "wandb").glob("offline-run-*")
    wait_for_the_end(folder)
    found = wandb_curves(folder)
    assert found == {name: [(step, pytest.approx(value)) for step, value in points]
                     for name, points in expected(result.history.rounds).items()}  # fmt: skip
    (table,) = (folder / "files" / "media" / "table").glob("decisions_*.json")
    rows = json.loads(table.read_text())["data"]
    assert [row[-1] for row in rows] == [c.reason for r in result.history.rounds for c in r.clients]
    assert list((folder / "files" / "media" / "images").glob("run_*.png"))
    weights = load_file(folder / "files" / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in result.model.state_dict().items())
    (started,) = [r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run"][:1]
    assert started.display_name == "seed-0"
    assert {item.key for item in started.config.update} >= {"arm", "seed"}


def test_places_that_a_tracker_needs():
    for name, message in (("mlflow", "the tracker mlflow needs a place"), ("tensorboard", "needs a folder")):
        pytest.importorskip(name)
        with pytest.raises(fa.FedalignError, match=message):
            fa.simulate(federation(), linear, fa.Align(0.3), 1, 0, LOCAL, device="cpu", track=name)
