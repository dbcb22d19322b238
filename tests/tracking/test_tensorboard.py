"""TensorBoard's files, read back by its own reader, hold the numbers of ``rounds.jsonl``."""

import pytest
from conftest import interrupted_before

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.tracking.tensorboard import TensorBoard

RUN = ["run", "synth-low", "--arms", "fedalign,auto", "--seeds", "1", "--rounds", "6", "--quiet", "--device", "cpu"]


def curves(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("arm", ["fedalign", "auto"])
def test_tensorboard_has_the_records_numbers(arm, tmp_path):
    assert main([*RUN, "--set", 'trackers=["tensorboard"]', "--out", str(tmp_path / "a")]) == 0
    run = tmp_path / "a" / arm / "seed-0"
    found, rounds = curves(run / "tensorboard"), RunStore(run).history().rounds
    for name in ("test_accuracy", "global_loss", "train_loss", "inclusion"):
        assert found[f"round/{name}"] == [(r.round, pytest.approx(getattr(r, name), rel=1e-6)) for r in rounds]
    assert found["clients/admitted"] == [(r.round, r.admitted) for r in rounds]
    assert found["cost/models_down"] == [(r.round, r.models_down) for r in rounds]


def test_a_resumed_run_has_every_round_once(tmp_path, monkeypatch):
    settings = [*RUN, "--set", 'trackers=["tensorboard"]', "--out", str(tmp_path / "a")]
    with interrupted_before(monkeypatch, 3):
        assert main(settings) == 130
    assert main([*settings, "--resume"]) == 0
    found = curves(tmp_path / "a" / "fedalign" / "seed-0" / "tensorboard")
    # Sorted, because files of one process and second are read in the order of their names, where 10 comes before 9.
    assert sorted(step for step, _ in found["round/test_accuracy"]) == list(range(6))


def test_a_folder_of_its_own(tmp_path):
    spec = f"tensorboard(folder={str(tmp_path / 'curves')!r})"
    assert main([*RUN, "--set", f"trackers={[spec]}", "--out", str(tmp_path / "a")]) == 0
    assert "round/test_loss" in curves(tmp_path / "curves" / "auto" / "seed-0")
    with pytest.raises(fa.FedalignError, match="needs a folder"):
        TensorBoard().on_start(fa.RunInfo("fedalign", 0, 3))


def test_decisions_settings_pictures_and_metrics(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = [*RUN, "--track", "tensorboard", "--set", 'metrics=["f1"]', "--set", "data.samples=30"]
    assert main([*settings, "--out", str(tmp_path / "a")]) == 0
    run = tmp_path / "a" / "auto" / "seed-0"
    events = reader.EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    rounds = RunStore(run).history().rounds
    assert curves(run / "tensorboard")["metric/f1.free"] == [
        (r.round, pytest.approx(r.metrics["f1"].free, rel=1e-6)) for r in rounds
    ]
    texts = {one.step: one.tensor_proto.string_val[0].decode() for one in events.Tensors("decisions/text_summary")}
    for record in rounds:
        for client in record.clients:
            assert f"| {client.decision} | {client.weight:.4g} |" in texts[record.round]
            assert client.reason in texts[record.round]
    assert "samples = 30" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert events.Tensors("outcome/text_summary")[0].tensor_proto.string_val[0].decode() == "finished after 6 rounds"
    assert len(events.Images("run")) == 1
    assert "model/1.weight" in events.Tags()["histograms"]
