"""Metrics: what they compute, for whom, on which data, and what is said when they cannot be computed."""

import json
import math

import pytest
import torch
from conftest import federation, flat, linear
from torch import nn

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.metrics import classification, regression
from fedalign.metrics.metric import Metric, as_metrics
from fedalign.protocol.records import RoundRecord

torchmetrics = pytest.importorskip("torchmetrics")
LOCAL = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)


def simulate(metrics, fed=None, rule=None, rounds=3, make=linear, **options):
    rule = rule or fa.Align(0.3)
    return fa.simulate(fed or federation(), make, rule, rounds, 0, LOCAL, device="cpu", metrics=metrics, **options)


def right(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def scores(seed, n=80, classes=4):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, classes, generator=draw), torch.randint(classes, (n,), generator=draw)


@pytest.mark.parametrize("seed", [0, 1])
def test_classification_agrees_with_torchmetrics(seed):
    outputs, targets = scores(seed)
    theirs = torchmetrics.classification
    pairs = [
        (classification.accuracy, theirs.MulticlassAccuracy(4, average="micro")),
        (classification.balanced_accuracy, theirs.MulticlassAccuracy(4, average="macro")),
        (classification.f1, theirs.MulticlassF1Score(4, average="macro")),
        (classification.precision, theirs.MulticlassPrecision(4, average=None)),
        (classification.recall, theirs.MulticlassRecall(4, average=None)),
        (classification.auc, theirs.MulticlassAUROC(4)),
    ]
    for mine, other in pairs:
        assert torch.allclose(mine(outputs, targets).float(), other(outputs.softmax(1), targets), atol=1e-5), mine
    top = theirs.MulticlassAccuracy(4, top_k=2, average="micro")
    assert classification.top_k(outputs, targets, k=2).item() == pytest.approx(top(outputs, targets).item(), abs=1e-6)
    error = theirs.MulticlassCalibrationError(4, n_bins=15)
    found = classification.calibration_error(outputs, targets).item()
    assert found == pytest.approx(error(outputs.softmax(1), targets).item(), abs=1e-5)


def test_one_logit_several_labels_and_sequences():
    outputs, targets = scores(3, classes=1)[0][:, 0], torch.arange(80) % 2
    theirs = torchmetrics.classification
    for given in (outputs, outputs[:, None]):
        assert classification.f1(given, targets).item() == pytest.approx(
            theirs.BinaryF1Score()(outputs.sigmoid(), targets).item()
        )
        assert classification.auc(given, targets.float()).item() == pytest.approx(
            theirs.BinaryAUROC()(outputs.sigmoid(), targets).item()
        )
    labels = (scores(5)[0] > 0.5).float()
    found = classification.f1(scores(4)[0], labels)
    assert found.item() == pytest.approx(theirs.MultilabelF1Score(4)(scores(4)[0].sigmoid(), labels.long()).item())
    tokens, truth = torch.randn(5, 7, 4), torch.randint(4, (5, 7))
    assert classification.accuracy(tokens, truth).item() == pytest.approx(right(tokens.movedim(2, 1), truth).item())
    assert classification.accuracy(tokens.movedim(2, 1), truth) == classification.accuracy(tokens, truth)
    padded = truth.clone()
    padded[:, 4:] = -100
    assert classification.accuracy(tokens, padded) == classification.accuracy(tokens[:, :4], truth[:, :4])
    with pytest.raises(fa.FedalignError, match=r"outputs of shape \(3, 4\) and targets of shape \(2,\) are neither"):
        classification.f1(torch.zeros(3, 4), torch.zeros(2))


def test_regression_agrees_with_torchmetrics():
    outputs, targets = torch.randn(50, 1), torch.randn(50)
    pairs = [
        (regression.mean_absolute_error, torchmetrics.MeanAbsoluteError()),
        (regression.root_mean_squared_error, torchmetrics.MeanSquaredError(squared=False)),
        (regression.r2, torchmetrics.R2Score()),
    ]
    for mine, other in pairs:
        assert mine(outputs, targets).item() == pytest.approx(other(outputs[:, 0], targets).item(), rel=1e-5)
    assert math.isnan(regression.r2(torch.zeros(3), torch.ones(3)))


def test_a_class_that_does_not_occur_is_left_out():
    outputs, targets = torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 0])
    each = classification.recall(outputs, targets)
    assert each[:2].tolist() == [0.5, 1.0]
    assert each[2:].isnan().all()
    assert classification.balanced_accuracy(outputs, targets).item() == 0.75


@pytest.mark.parametrize("engine", ["batched", "reference"])
@pytest.mark.parametrize("rule", [fa.Align(0.3), fa.AutoAlign()])
def test_a_metric_that_is_the_accuracy_is_the_test_accuracy(engine, rule):
    """Of the served model, with BatchNorm's statistics, weighted as the record weighs."""
    make = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))  # noqa: E731
    fed = federation()
    result = simulate({"mine": right, "held": Metric(right, on="heldout")}, fed, rule, make=make, engine=engine)
    for record in result.history.rounds:
        values = record.metrics["mine"]
        assert values.priority == pytest.approx(record.test_accuracy, abs=1e-9)
        assert values.split == "test"
        assert record.metrics["held"].split == "heldout"
    final = result.history[-1].metrics["mine"]
    assert final.clients == tuple(pytest.approx(measure.accuracy) for measure in result.clients)
    free = [k for k, client in enumerate(fed.clients) if not client.priority]
    weights = [fed.p[k] for k in free]
    assert final.free == pytest.approx(
        sum(w * final.clients[k] for w, k in zip(weights, free, strict=True)) / sum(weights)
    )
    assert final.free_pooled == pytest.approx(sum(final.clients[k] for k in free) / 3)  # 50 test samples each


def test_metrics_do_not_change_a_run():
    plain, measured = simulate({}), simulate(["f1", "auc"])
    assert torch.equal(flat(plain.model), flat(measured.model))
    assert [r.test_loss for r in plain.history.rounds] == [r.test_loss for r in measured.history.rounds]


def test_objects_of_torchmetrics_several_values_and_tables():
    own = torchmetrics.classification.MulticlassF1Score(4)
    both = torchmetrics.MetricCollection({"p": torchmetrics.classification.MulticlassPrecision(4), "f": own.clone()})
    result = simulate(
        {"f1": "f1", "theirs": own, "each": "recall", "both": both, "table": lambda o, t: {"a": 1, "b": 2.0}}
    )
    last = result.history[-1].metrics
    assert set(last) == {"f1", "theirs", *(f"each.{c}" for c in range(4)), "both.p", "both.f", "table.a", "table.b"}
    assert last["theirs"].priority == pytest.approx(last["both.f"].priority, rel=1e-5)
    assert last["theirs"].priority_pooled == pytest.approx(last["f1"].priority_pooled, rel=1e-5)
    assert own._update_count == 0  # the user's object is not used up
    frame = result.history.to_frame()
    assert frame["f1.free"].iloc[-1] == last["f1"].free
    assert frame["f1.client"].tail(5).tolist() == list(last["f1"].clients)


def test_local_only_training_has_no_pooled_figures():
    values = simulate({"mine": right}, rule=fa.Alone()).history[-1].metrics["mine"]
    assert values.priority_pooled is values.free_pooled is None
    assert None not in values.clients


def test_a_record_with_metrics_is_read_back():
    record = simulate(["f1", "recall"]).history[-1]
    assert RoundRecord.from_json(record.to_json()) == record
    old = json.loads(record.to_json())
    del old["metrics"]
    assert RoundRecord.from_json(json.dumps(old)).metrics == {}


def test_values_of_a_history_by_name():
    history = simulate(["f1"]).history
    assert history.values("f1") == history.values("f1.priority") == [r.metrics["f1"].priority for r in history.rounds]
    assert history.values("f1.free") == [r.metrics["f1"].free for r in history.rounds]
    assert history.final("test_accuracy", last=1) == history[-1].test_accuracy
    with pytest.raises(fa.FedalignError, match=r"there is no figure 'test_los' in a round; did you mean 'test_loss'"):
        history.values("test_los")


def test_undefined_values_are_none_and_left_out_of_means():
    metric = lambda outputs, targets: math.nan if len(targets) != 50 else 0.5  # noqa: E731
    values = simulate({"some": Metric(metric, on="test")}).history[0].metrics["some"]
    assert values.priority == 0.5  # of the clients, with 50 samples each
    assert values.priority_pooled is None  # of all of them together
    nothing = simulate({"none": lambda outputs, targets: math.inf}).history[0].metrics["none"]
    assert (nothing.priority, nothing.clients) == (None, (None,) * 5)


def test_without_test_data_held_out_data_is_used_and_named():
    fed = fa.Federation.from_arrays([scores(k) for k in range(3)], priority=[True, False, False])
    result = fa.simulate(fed, lambda: nn.Linear(4, 4), fa.Align(0.3), 2, 0, LOCAL, device="cpu", metrics=["accuracy"])
    assert result.history[0].metrics["accuracy"].split == "heldout"
    with pytest.raises(fa.FedalignError, match=r"'mine' is measured on test data, but no priority client has any; use"):
        simulate({"mine": Metric(right, on="test")}, fed, make=lambda: nn.Linear(4, 4))


def fails(outputs, targets):
    raise ValueError("only one class")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"mine": fails},
            r"the metric 'mine' fails on the samples of client '0': ValueError: only one class \(test_metr",
        ),
        ({"mine": lambda o, t: "good"}, "the metric 'mine' gave 'good', which is not a number"),
        ({"mine": 3}, "a metric must be a function of outputs and targets, not 3"),
        ({"two words": right}, "a metric's name must be one word, not 'two words'"),
        ("recal", r"metrics.recal is 'recal'; did you mean 'recall'\?"),
        (["f1", "f1"], "metrics names 'f1' twice"),
        (["f1(averag='micro')"], r"unknown key metrics.f1.averag; did you mean 'average'\?"),
        (["f1(on='tests')"], "metrics.f1.on must be 'auto', 'test', 'heldout' or 'train', not 'tests'"),
        (3, "metrics must be a table of names and functions, or a list of names, not 3"),
        (["top-k(k=9)"], "top-k with k=9 needs at least 9 classes"),
    ],
)
def test_bad_metrics_are_refused_before_any_round(metrics, message):
    heard = []
    with pytest.raises(fa.FedalignError, match=message):
        simulate(metrics, on_round=heard.append)
    assert not heard


def test_names_and_options():
    made = as_metrics({"val": "f1(average='micro', on='heldout')", "k": {"kind": "top-k", "k": 2}})
    outputs, targets = scores(0)
    assert made["val"].on == "heldout"
    assert made["val"].function(outputs, targets).item() == pytest.approx(right(outputs, targets).item())


MINE = """
def share(outputs, targets, cls: int = 0):
    return (targets == cls).double().mean()
"""


def test_metrics_of_a_file_are_in_rounds_and_summary(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    text = (
        'rounds = 3\nseeds = 2\narms = ["priority", "local"]\n[data]\nkind = "synth"\nsamples = 30\n'
        '[model]\nkind = "logistic"\ninputs = 60\nclasses = 10\n[local]\nlr = 0.1\nepochs = 1\n'
        '[metrics]\nf1 = "f1"\nones = { kind = "mine:share", cls = 1 }\n'
        "theirs = \"torchmetrics.classification:MulticlassF1Score(num_classes=10, average='macro')\"\n"
    )
    (tmp_path / "mine.toml").write_text(text)
    out = tmp_path / "out"
    run = ["run", str(tmp_path / "mine.toml"), "--out", str(out), "--device", "cpu", "--quiet"]
    assert main(run) == 0
    rounds = RunStore(out / "priority" / "seed-0").history()
    assert set(rounds[0].metrics) == {"f1", "ones", "theirs"}
    row = json.loads((out / "priority" / "seed-0" / "rounds.jsonl").read_text().splitlines()[-1])["metrics"]["f1"]
    assert list(row) == ["priority", "free", "priority_pooled", "free_pooled", "clients", "split"]
    summary = json.loads((out / "summary.json").read_text())["arms"]["priority"]["metrics"]["f1"]
    assert summary["priority"]["per_seed"][0] == pytest.approx(rounds.final("f1"))
    assert summary["free"]["mean"] is not None
    capsys.readouterr()
    assert main([*run[:-1], "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "Means over priority | free clients" in shown
    assert f"{summary['priority']['mean']:.4f} | {summary['free']['mean']:.4f}" in shown
    assert main([*run[:2], "--out", str(tmp_path / "b"), "--set", "metrics.f1=recal"]) == 2
    assert "metrics.f1 is 'recal'; did you mean 'recall'?" in capsys.readouterr().err
