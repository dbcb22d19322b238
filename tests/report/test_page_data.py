"""The page's data: what it holds, what it leaves out, and that it stays small."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import federation, linear

import fedalign as fa
from fedalign.experiments.summary import summarise
from fedalign.protocol.records import ClientRound, RoundRecord, Tried
from fedalign.report import client_data, page_data
from fedalign.report.page import render_page
from fedalign.report.read_runs import RunFolder


def run_of(histories, rounds):
    summary = {"arms": summarise(histories, {}, set()), "seeds": list(next(iter(histories.values())))}
    settings = {"name": "made-up", "description": "", "rounds": rounds, "warmup": 0.1}
    return RunFolder(Path("made-up"), settings, summary, histories, {})


@pytest.fixture(scope="module")
def verified():
    return fa.simulate(federation(), linear, "auto", 4, trust="verify", device="cpu").history


def unpack(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_it_holds_the_rounds_clients_and_choices(verified):
    data = unpack(page_data.packed(page_data.page_data([run_of({"auto": {3: verified}}, 4)])))
    (run,) = data["runs"]
    (seed,) = run["arms"][0]["seeds"]
    assert (seed["seed"], seed["rounds"], data["headline"]) == (3, 4, "test_accuracy")
    assert seed["values"]["test_accuracy"] == pytest.approx([r.test_accuracy for r in verified.rounds], rel=1e-4)
    for k, client in enumerate(seed["clients"]):
        letters = {letter: word for word, letter in client_data.LETTERS.items()}
        assert [letters[c] for c in client["decisions"]] == [r.clients[k].decision for r in verified.rounds]
        assert [data["reasons"][i] for i in client["reasons"]] == [r.clients[k].reason for r in verified.rounds]
    last = seed["choices"][-1]
    assert [t[1] for t in last["tried"]] == [t.admitted for t in verified[-1].tried]
    assert verified[-1].tried[last["chosen"]].chosen
    assert seed["promise"][-1][1] == pytest.approx(verified[-1].promise.worse_by, rel=1e-3)


def test_contributions_are_read_from_the_reasons_of_verified_rounds(verified):
    columns = client_data.client_columns(verified, 1, client_data.Texts())
    free = [client for client in columns if not client["priority"]]
    assert all("contribution" in client for client in free)
    for client in free:
        reason = verified[-1].clients[client["id"]].reason
        assert f"{client['contribution'][-1]:+}".rstrip("0").rstrip(".") in reason.replace("+0 %", "+0")
    assert "contribution" not in columns[0]


def test_figures_that_are_not_finite_or_missing_are_left_out(verified):
    odd = replace(verified[0], test_loss=float("inf"), test_accuracy=None, epsilon=float("inf"), tried=())
    data = page_data.page_data([run_of({"auto": {0: fa.History([odd])}}, 1)])
    seed = data["runs"][0]["arms"][0]["seeds"][0]
    assert seed["values"]["test_loss"] == [None]
    assert seed["epsilon"] == ["inf"]
    assert "choices" not in seed
    assert "test_accuracy" not in [measure["key"] for measure in data["measures"]]
    page_data.packed(data)


def test_an_empty_run_has_a_page():
    assert "No round has a figure to compare yet." in render_page([run_of({"auto": {0: fa.History()}}, 5)])


def test_a_large_runs_details_are_thinned_out(verified, monkeypatch):
    monkeypatch.setattr(client_data, "MOST_ROWS", 10)
    data = page_data.page_data([run_of({"auto": {0: verified}}, 4)])
    assert data["step"] == 2  # 4 rounds of 5 clients
    client = data["runs"][0]["arms"][0]["seeds"][0]["clients"][0]
    assert (len(client["loss"]), len(client["decisions"])) == (2, 4)


@pytest.mark.slow
def test_the_page_of_a_run_like_synth_medium_is_small():
    """Five arms, five seeds, 200 rounds, 20 clients; all numbers and reasons differ."""
    draw = np.random.default_rng(0)

    def history():
        rounds = []
        for t in range(200):
            numbers = [float(number) for number in draw.random(5)]
            clients = []
            for k in range(20):
                loss, accuracy, weight = (float(number) for number in draw.random(3))
                reason = f"loss {loss:.4g}, not within {numbers[1]:.4g} of {numbers[0]:.4g}"
                clients.append(ClientRound(k, f"c-{k}", k < 10, True, loss, accuracy, "refused", weight, reason))
            tried = tuple(Tried(float(draw.random()), k, float(draw.random()), k == 3) for k in range(8))
            rounds.append(RoundRecord(t, 0.2, *numbers, False, None, 20, 20, tuple(clients), samples=9, tried=tried))
        return fa.History(rounds)

    histories = {
        arm: {seed: history() for seed in range(5)} for arm in ("priority", "all", "local", "fedalign", "auto")
    }
    assert len(render_page([run_of(histories, 200)]).encode()) < 3_000_000
