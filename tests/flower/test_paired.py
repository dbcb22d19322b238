"""Two models compared sample by sample over Flower's messages: as the simulation counts, and without bad replies."""

import in_process
import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from in_process import DATA, model

import fedalign as fa
from fedalign.flower.wire import get_outcomes, put_outcomes
from fedalign.protocol.messages import Outcomes, Paired
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
