"""Hostile buffers: a free client's variances, counters and frozen parameters cannot end a run."""

import dataclasses

import pytest
import torch
from conftest import blobs, federation
from torch import nn

import fedalign as fa
from fedalign.aggregation.buffer_checks import BufferReader, wrong_buffers
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.live_run import LiveRun

pytestmark = pytest.mark.slow

LOCAL = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
RULES = [fa.Everyone(), fa.Align(9.0), fa.GradientAlign(-1), fa.TrustWeighted(), fa.AutoAlign()]
HOSTILE = 4


def normalised(momentum=0.1):
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Linear(5, 4))


def averaged():
    return normalised(None)


def frozen():
    model = normalised()
    model[0].requires_grad_(False)
    return model


class Indexed(nn.Module):
    """A model with a constant table of indices, as position embeddings have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(6))
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(x[..., self.order])


def tampered(monkeypatch, model, name, change):
    """Let the hostile client send another value of one of the model's tensors."""
    sent, place = LiveRun.sent, Layout(model()).places[name]

    def send(run, k, trained):
        done = sent(run, k, trained)
        if k != HOSTILE:
            return done
        flat = done.model.clone()
        flat[place] = change(flat[place])
        return dataclasses.replace(done, model=flat, finite=torch.isfinite(flat).all())

    monkeypatch.setattr(LiveRun, "sent", send)


def run(model, rule, rounds=3, fed=None, **options):
    return fa.simulate(fed or federation(), model, rule, rounds, 0, LOCAL, device="cpu", **options)


@pytest.mark.parametrize("engine", ["batched", "reference"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_negative_variance_is_refused_and_the_run_goes_on(monkeypatch, rule, engine):
    tampered(monkeypatch, normalised, "1.running_var", lambda v: torch.where(torch.arange(5) == 2, -50.0, v))
    result = run(normalised, rule, engine=engine)
    assert len(result.history) == 3
    for record in result.history.rounds:
        assert record.clients[HOSTILE].decision == "refused"
        assert record.clients[HOSTILE].reason == "its running variance in the layer 1 is negative: -50"
        assert record.test_loss is not None
    assert (result.model[1].running_var > 0).all()


@pytest.mark.parametrize(
    ("model", "name", "change", "reason"),
    [
        (normalised, "1.running_var", lambda v: v * 1e30, "its running statistics in the layer 1 are"),
        (normalised, "1.running_mean", lambda v: v - 1e5, "its running statistics in the layer 1 are"),
        (normalised, "1.running_mean", lambda v: v * torch.nan, "its trained weights are not finite"),
        (normalised, "1.running_var", lambda v: v + torch.inf, "its trained weights are not finite"),
        (normalised, "1.num_batches_tracked", lambda v: v * 0 - 1, "its batch counter in the layer 1 is -1"),
        (normalised, "1.num_batches_tracked", lambda v: v * 0 + 1e30, "its batch counter in the layer 1 is 1e+30"),
        (averaged, "1.num_batches_tracked", lambda v: v + 1e9, "its batch counter in the layer 1 grew"),
        (frozen, "0.weight", lambda v: v * 1e20, "it changed 0.weight, which no priority client changed"),
        (Indexed, "order", lambda v: v + 1000, "it changed order, which no priority client changed"),
    ],
)
def test_absurd_buffers_are_refused(monkeypatch, model, name, change, reason):
    tampered(monkeypatch, model, name, change)
    result = run(model, fa.Everyone(), rounds=2)
    for record in result.history.rounds:
        assert record.clients[HOSTILE].decision == "refused"
        assert record.clients[HOSTILE].reason.startswith(reason)
        assert [c.decision for c in record.clients[2:4]] == ["admitted", "admitted"]


@pytest.mark.parametrize("steps", [1, 8])
def test_statistics_just_below_the_bound_cannot_grow_from_round_to_round(monkeypatch, steps):
    """With one local step the received statistics weigh 0.9 in everybody's: the bound must not follow them."""
    tampered(monkeypatch, normalised, "1.running_var", lambda v: v * 1000)
    local = fa.LocalSGD(lr=0.01, steps=steps, batch_size=10)
    result = fa.simulate(federation(), normalised, fa.Everyone(), 30, 0, local, device="cpu")
    assert {r.clients[HOSTILE].decision for r in result.history.rounds} == {"admitted", "refused"}
    assert result.model[1].running_var.max() < 1e4


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_scale_is_that_of_the_batches(momentum):
    layout = Layout(normalised(momentum))
    module, x = normalised(momentum), torch.randn(40, 6)
    received = layout.flatten(module)
    received[layout.places["1.running_var"]] = 1e8
    received[layout.places["1.num_batches_tracked"]] = 6
    layout.load(module, received)
    for batch in x.split(10):
        module(batch)
    reader = BufferReader(layout)
    scale = reader.read(layout.flatten(module), received).layers["1"].scale
    hidden = module[0](x)
    assert 0.1 < scale / hidden.std(0).max().item() < 1e3  # float32 cannot tell more beside a variance of 1e8
    assert module[1].running_var.max() > 1e7


@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("model", [normalised, averaged, frozen, Indexed])
@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_honest_clients_are_not_refused(model, factor, engine):
    """Of another distribution, with a single batch, with 11 times the data; in the first rounds and in later ones."""
    clients = [blobs(40, 0), blobs(30, 1), blobs(440, 2), blobs(3, 3), blobs(25, 4, shift=1.0)]
    clients[4] = (clients[4][0] * factor + factor, clients[4][1])
    fed = fa.Federation.from_arrays(clients, priority=[True, True, False, False, False])
    result = run(model, fa.Everyone(), rounds=8, fed=fed, engine=engine)
    assert {c.decision for r in result.history.rounds for c in r.clients[2:]} == {"admitted"}


def test_the_length_bound_counts_trainable_weights_alone():
    """A client with 11 times the data counts 11 times the batches; that is not a long update."""
    clients = [blobs(40, 0), blobs(40, 1), blobs(440, 2)]
    fed = fa.Federation.from_arrays(clients, priority=[True, True, False])
    local = fa.LocalSGD(lr=1e-4, epochs=5, batch_size=4)
    options = {"device": "cpu", "server_steps": [fa.LengthBound(15)]}
    result = fa.simulate(fed, normalised, fa.Everyone(), 2, 0, local, **options)
    assert [r.clients[2].decision for r in result.history.rounds] == ["admitted"] * 2


def test_models_without_buffers_are_not_read():
    reader, flat = BufferReader(Layout(nn.Linear(2, 2))), torch.zeros(6)
    assert not reader.reads_something
    assert reader.read(flat, flat) is None


def test_without_a_priority_client_there_is_no_scale():
    layout = Layout(normalised())
    reader, flat = BufferReader(layout), layout.flatten(normalised())
    moved = flat.clone()
    moved[layout.places["1.running_var"]] = 1e9
    facts = reader.read(moved, flat)
    assert wrong_buffers(facts, []) is None
    assert "times those of the priority clients" in wrong_buffers(facts, [reader.read(flat, flat)])
