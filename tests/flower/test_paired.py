"""Two models compared sample by sample over Flower's messages: as the simulation counts, and without bad replies."""

from dataclasses import replace

import in_process
import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from in_process import DATA, history, model

import fedalign as fa
from fedalign.flower.wire import get_outcomes, put_outcomes
from fedalign.protocol.autoalign import autoalign
from fedalign.protocol.messages import Outcomes, Paired, RoundDone
from fedalign.protocol.promise import compare_served
from fedalign.protocol.records import Promise
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data
from fedalign.simulation.engine.pairs import PairJob

federation, keys = in_process.federation, in_process.keys


def pair():
    torch.manual_seed(0)
    return (torch.randn(610), torch.randn(610))


def asked(server, clients=(0, 1)):
    driver = server()._driver
    driver.online()
    return driver.answer(Paired(pair(), clients, "heldout"))


def test_it_counts_as_the_simulation(federation):
    _, server = federation()
    fed = DATA.federation(seed=0)
    engine = BatchedEngine(model(), fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
    (expected,) = engine.pairs.compare([PairJob(pair(), fed.pool, {k: fed.clients[k].heldout for k in (0, 1)})])
    assert asked(server) == expected
    assert all(one.samples == 12 and one.gained + one.lost > 0 for one in expected.values())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gained": 3.0, "lost": 1.0},
        {"gained": 8.0, "lost": 8.0, "samples": 12},
        {"gained": -1.0, "lost": 1.0, "samples": 12},
        {"gained": float("nan"), "lost": 1.0, "samples": 12},
        {"gained": 1.0, "lost": float("inf"), "samples": 12},
        {"gained": [1.0], "lost": 0.0, "samples": 12},
        {"gained": 0.0, "lost": 0.0, "samples": 0},
        {"gained": 0.0, "lost": 0.0, "samples": 12.0},
    ],
)
def test_a_reply_that_makes_no_sense_counts_as_none(federation, values):
    grid, server = federation()

    def tampered(reply, message):
        if message.metadata.message_type != "evaluate":
            return reply
        return Message(RecordDict({"outcomes": MetricRecord(values)}), reply_to=message)

    grid.tamper[1] = tampered
    assert list(asked(server)) == [0]


def test_a_lost_client_and_one_without_samples_are_missing(federation):
    grid, server = federation(nodes={0: {"partition-id": 0}, 1: {"partition-id": 1, "heldout": False}}, match="loss")
    driver = server()._driver
    driver.exchange.nodes = {0: 100, 1: 101}
    assert list(driver.answer(Paired(pair(), (0, 1), "heldout"))) == [0]
    del grid.nodes[0]
    assert driver.answer(Paired(pair(), (0,), "heldout")) == {}


def test_outcomes_come_back():
    content = RecordDict()
    put_outcomes(content, Outcomes(1.5, 2.0, 10))
    assert get_outcomes(content) == Outcomes(1.5, 2.0, 10)
    put_outcomes(content, None)
    assert get_outcomes(content) is None
    assert get_outcomes(RecordDict()) is None


class Watched(fa.AutoAlign):
    """AutoALIGN with a promise in every round."""

    algorithm = "test_paired:watched"


def watched(plan, snapshot):
    """Run AutoALIGN; compare what it serves with the priority-only model."""
    run, reply, before = autoalign(plan, snapshot), None, Promise()
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, RoundDone):
            tensors, t = request.snapshot.tensors, request.record.round
            own = tensors.get("priority_only", tensors["model"])
            choices = max(1, len(request.record.tried))
            before = yield from compare_served(
                t, before, tensors["model"], own, (0, 1), "heldout", choices=choices, rounds=plan.rounds
            )
            request = replace(request, record=replace(request.record, promise=before))
        reply = yield request


def test_promises_are_those_of_both_engines(federation, tmp_path):
    # With credit, the choice is served in all these rounds.
    _, server = federation(rule="test_paired:Watched(credit=true)", warmup=0.0)
    server().run()
    found = [r.promise for r in history(tmp_path)]
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    for engine in ("batched", "reference"):
        fed = DATA.federation(seed=0)
        result = fa.simulate(fed, model, Watched(credit=True), 5, 0.0, local, device="cpu", engine=engine)
        assert [r.promise for r in result.history.rounds] == found
    assert (found[0].worse_by, found[0].samples) == (0.0, 0), "the own model was served"
    assert all(promise.samples == 24 and promise.strict > promise.worse_by for promise in found[1:])
    assert any(promise.gained + promise.lost for promise in found)
