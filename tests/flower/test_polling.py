"""The pauses between two looks for a message."""

import threading
import time
from types import SimpleNamespace

import pytest

import fedalign as fa
from fedalign.flower.polling import Paced, quicken_pulls, quicken_supernode, shortest_pause


class Clock:
    """A clock that moves while somebody sleeps."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_node_looks_often_after_a_message_and_seldom_later():
    clock = Clock()
    paced = Paced(0.2, clock, clock.sleep)
    while clock.now < 100:
        paced.sleep(3)
    assert (clock.slept[0], clock.slept[-1]) == (0.2, 3)  # at last it is Flower's own pause
    assert clock.slept == sorted(clock.slept)
    clock.slept.clear()
    for _ in range(2):
        paced.sleep(0.5)  # the ClientApp works on a message
        paced.sleep(3)
    assert clock.slept == pytest.approx([0.02, 0.2] * 2)
    clock.slept.clear()
    while clock.now < 200:
        paced.sleep(0.5)
    assert (clock.slept[0], clock.slept[-1]) == (0.02, 0.5)


def test_a_busy_superlink_is_left_alone_until_it_answers_quickly_again():
    clock = Clock()
    paced = Paced(0.2, clock, clock.sleep)

    def look(took):
        clock.now += took
        paced.sleep(3)
        paced.sleep(0.5)  # a message comes, so that the time without one plays no part
        clock.slept.clear()
        paced.sleep(3)
        clock.now += took
        paced.sleep(3)
        return clock.slept[-1]

    assert look(0.01) == 0.2
    assert [look(0.06) for _ in range(5)] == [0.2] * 5  # as a few nodes have it while they exchange models
    busy = [look(0.6) for _ in range(20)]
    assert busy == sorted(busy)
    assert busy[-1] == 3  # Flower's own pause, and never more
    assert [look(0.01) for _ in range(20)][-1] == 0.2


def test_the_time_of_a_clientapps_work_is_not_taken_for_a_slow_look():
    clock = Clock()
    paced = Paced(0.2, clock, clock.sleep)
    for _ in range(5):
        paced.sleep(3)
        clock.now += 0.01
        paced.sleep(3)
        clock.now += 50.0  # a message with a large model, and the work on it
        paced.sleep(0.5)
        clock.now += 50.0
        paced.sleep(3)
        assert clock.slept[-1] == 0.2


def test_it_is_the_module_time_otherwise():
    assert Paced(0.2).monotonic is time.monotonic
    with pytest.raises(AttributeError):
        _ = Paced(0.2).no_such_name


def test_flowers_loop_gets_the_pauses(monkeypatch):
    from flwr.supernode import start_client_internal as loop

    monkeypatch.setattr(loop, "time", time)
    monkeypatch.setenv("FEDALIGN_POLL", "1.5")
    quicken_supernode()
    assert isinstance(loop.time, Paced)
    quicken_supernode()  # once is enough
    assert isinstance(loop.time, Paced)
    assert loop.time.sleep is not time.sleep


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "3600"])
def test_a_wrong_pause_is_said(given):
    with pytest.raises(fa.FedalignError, match="FEDALIGN_POLL must be a number of seconds"):
        shortest_pause(given)


def test_the_command_says_it_before_anything_starts(monkeypatch, capsys):
    from fedalign.cli import main

    monkeypatch.setenv("FEDALIGN_POLL", "soon")
    assert main(["flower", "node", "--superlink", "127.0.0.1:1"]) == 2
    assert "FEDALIGN_POLL" in capsys.readouterr().err


@pytest.fixture
def waits(monkeypatch):
    """The pauses that Flower's functions for parts of a message make, which take no time here."""
    from flwr.supercore.inflatable import inflatable_utils as parts

    found = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            found.append(timeout)
            return self.is_set()

    monkeypatch.setattr(parts, "threading", SimpleNamespace(Event=Event, Lock=threading.Lock))
    for fetch in (parts.pull_objects, parts.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(fetch, "__kwdefaults__", dict(fetch.__kwdefaults__))
    return found


def pulled(tries):
    """Fetch a part that comes with a later try; Flower's own functions do it."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

    asked = []

    def pull(name):
        asked.append(name)
        if len(asked) < tries:
            raise ObjectUnavailableError(name)
        return b"here"

    return pull_objects(["part"], pull)


def test_parts_that_have_not_come_are_asked_for_soon(waits):
    assert pulled(3) == {"part": b"here"}
    assert min(waits) > 0.7  # Flower's own pauses: a second, two, and so on
    waits.clear()
    quicken_pulls()
    assert pulled(3) == {"part": b"here"}
    assert len(waits) == 2
    assert max(waits) < 0.1


def test_parts_that_take_long_are_waited_for_and_not_asked_for_all_the_time(waits):
    quicken_pulls()
    assert pulled(2000) == {"part": b"here"}  # more tries than Flower's own limit of 500
    assert min(waits[-1000:]) >= 0.4


def test_messages_to_a_clientapp_get_the_shorter_pauses_too(waits):
    from flwr.app import ConfigRecord, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_and_inflate_object_from_tree

    content = RecordDict({"task": ConfigRecord({"client": 3})})
    parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    early = set(parts)

    def pull(name):
        if name in early:
            early.remove(name)
            raise ObjectUnavailableError(name)
        return parts[name]

    quicken_pulls()
    found = pull_and_inflate_object_from_tree(get_object_tree(content), pull, lambda name: None)
    assert found["task"]["client"] == 3
    assert 0 < max(waits) < 0.1
