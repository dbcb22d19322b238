"""The pauses between two looks for a message."""

import time

import pytest

import fedalign as fa
from fedalign.flower.polling import Paced, quicken_supernode, shortest_pause


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
