"""Metrics, early stopping, the best round and trackers over Flower, as in a simulation."""

import threading
import warnings

import in_process
import pytest
import torch
from flwr.app import Context, MetricRecord, RecordDict
from in_process import DATA, history, model, weights
from safetensors import safe_open

import fedalign as fa
from fedalign.experiments.folder_lock import NAME, FolderLock
from fedalign.experiments.store import RunStore
from fedalign.flower.server_app import main
from fedalign.tracking.tracker import curves_of
from fedalign.training.local import LocalSGD

federation, keys = in_process.federation, in_process.keys


def simulated(rule, rounds=5, **options):
    local = LocalSGD(lr=0.1, epochs=2, batch_size=20)
    return fa.simulate(DATA.federation(0), model, rule, rounds, local=local, device="cpu", free_cap=1.0, **options)


def test_clients_measure_metrics_as_in_a_simulation(federation, tmp_path):
    grid, server = federation(rule="all", metrics="f1; recall; accuracy(on='heldout')")
    seen = []
    for k in range(6):
        grid.tamper[k] = lambda reply, message: seen.append(reply.content) or reply
    server().run()
    theirs = simulated(fa.Everyone(), metrics=["f1", "recall", "accuracy(on='heldout')"]).history.rounds
    for mine, other in zip(history(tmp_path), theirs, strict=True):
        assert set(mine.metrics) == set(other.metrics)
        for name, values in mine.metrics.items():
            assert values.clients == tuple(
                None if v is None else pytest.approx(v, abs=1e-6) for v in other.metrics[name].clients
            )
            assert values.priority == pytest.approx(other.metrics[name].priority, abs=1e-6)
            assert values.free == pytest.approx(other.metrics[name].free, abs=1e-6)
            assert values.priority_pooled is None
        assert mine.metrics["accuracy"].split == "heldout"
        assert mine.metrics["f1"].split == "test"
    sent = [content["metrics"] for content in seen if "metrics" in content]
    assert len(sent) == 30  # numbers alone leave a client
    assert all(isinstance(value, float) for record in sent for value in record.values())


def test_a_client_s_nonsense_is_left_out_of_the_metrics(federation, tmp_path):
    grid, server = federation(rule="all", rounds=1, metrics="f1")

    def lie(reply, message):
        if "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord({"f1": float("nan"), "f2": 3.0, "f1.extra": 0.5})
        return reply

    grid.tamper[5] = lie
    server().run()
    found = history(tmp_path)[0].metrics
    assert found["f1"].clients[5] is None
    assert "f2" not in found
    assert found["f1"].free is not None


def test_early_stopping_and_the_best_round_and_resume(federation, tmp_path):
    stop = "early-stopping(metric='test_loss', patience=2, min_delta=100.0); best-round(metric='test_accuracy')"
    _, server = federation(rule="all", callbacks=stop, trackers="tensorboard")
    server().run()
    rounds, store = history(tmp_path), RunStore(tmp_path / "out")
    assert len(rounds) == 3
    assert store.stopped().round == 2
    assert "test_loss has not improved in 2 rounds" in store.stopped().reason
    best = max(range(3), key=lambda t: rounds[t].test_accuracy)
    with safe_open(store.best, "pt") as file:
        assert file.metadata() == {
            "round": str(best), "measure": "test_accuracy", "value": repr(rounds[best].test_accuracy)
        }  # fmt: skip
    theirs = simulated(fa.Everyone(), callbacks=[fa.EarlyStopping("test_loss", 2, min_delta=100.0)])
    assert theirs.stopped.round == 2
    for name, tensor in weights(tmp_path).items():
        assert torch.allclose(tensor, theirs.model.state_dict()[name], atol=1e-5)
    again = {"rule": "all", "callbacks": stop, "resume": str(tmp_path / "out")}
    federation(**again)[1]().run()
    assert len(history(tmp_path)) == 3  # it stays stopped
    federation(**again, continue_stopped=True)[1]().run()
    assert len(history(tmp_path)) == 5
    assert store.stopped().round == 4  # patience again, from where it went on


@pytest.mark.slow
def test_mlflow_over_flower_has_the_records_numbers(federation, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    federation(rule="fedalign", rounds=2, metrics="f1", trackers=f"mlflow(uri='sqlite:///{tmp_path}/a.db')")[1]().run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SQLAlchemy's, of MLflow's own code
        client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/a.db")
        (run,) = client.search_runs([client.get_experiment_by_name("flower").experiment_id])
        for record in history(tmp_path):
            for name, value in curves_of(record).items():
                steps = {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
                assert steps[record.round] == value
        assert run.data.params["rule"] == "fedalign"
        assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"decisions.csv", "model.safetensors"}


def test_a_tracker_that_fails_does_not_end_the_run(federation, tmp_path, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, server = federation(rule="all", rounds=2, track="test_flower_control:Broken")
        with caplog.at_level("WARNING", "flwr"):
            server().run()
    assert len(history(tmp_path)) == 2
    assert caplog.text.count("the tracker test_flower_control:Broken failed in round 0") == 1


class Broken(fa.Callback):
    def on_round(self, record, model):
        raise OSError("no disk")


def test_a_folder_that_is_written_is_refused(federation, tmp_path):
    grid, _ = federation()
    context = Context(1, 1, {}, RecordDict(), grid.run_config)
    said = []

    def second():
        with pytest.raises(fa.FedalignError) as caught:
            main(grid, context)
        said.append(str(caught.value))

    with FolderLock(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "out is being written by process" in said[0]
    main(grid, context)
    assert len(history(tmp_path)) == 5
    assert not (tmp_path / "out" / NAME).exists()
