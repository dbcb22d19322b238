"""The ledger in a report: a table with a link to each client's page, and what each client gave so far."""

import re

import pytest

import fedalign as fa
from fedalign.ledger.account import accounts
from fedalign.ledger.chain import NAME, read_chain
from fedalign.report.page import render_parts
from fedalign.report.page_data import page_data
from fedalign.report.read_runs import read_run

SETTINGS = {
    "name": "small",
    "rounds": 4,
    "seeds": 1,
    "data": {"kind": "synth", "priority": 2, "free": 3, "samples": 60, "test_samples": 20},
    "model": {"kind": "logistic", "inputs": 60, "classes": 10},
    "local": {"lr": 0.1, "epochs": 1, "batch_size": 20},
}


@pytest.fixture
def folder(tmp_path):
    fa.Experiment(arms=["all", "priority"], ledger="exact", **SETTINGS).run(tmp_path / "out")
    return tmp_path / "out"


def test_the_page_has_the_ledger_with_a_link_to_each_client(folder):
    html = str(render_parts([read_run(folder)])["ledger"])
    found = accounts(read_chain(folder / "all" / "seed-0" / NAME).rows)
    for k, one in found.items():
        assert f'href="#client={k}&amp;run=0&amp;arm=all">{one.name}</a>' in html
        assert f"{one.gave:+.3g}" in html
    assert "It is not signed." in html
    assert (folder / "ledger-all.png").exists()
    assert 'id="ledger"' in (folder / "report.html").read_text()


def test_a_clients_page_has_what_it_gave_so_far(folder):
    (arm, _) = page_data([read_run(folder)])["runs"][0]["arms"]
    found = accounts(read_chain(folder / "all" / "seed-0" / NAME).rows)
    for client in arm["seeds"][0]["clients"]:
        assert len(client["gave"]) == 4
        assert client["gave"][-1] == pytest.approx(found[client["id"]].gave, rel=1e-3)


def test_a_ledger_that_does_not_hold_is_reported(folder):
    path = folder / "all" / "seed-0" / NAME
    path.write_bytes(path.read_bytes().replace(b'"name":"free-0"', b'"name":"<b>"', 1))
    html = str(render_parts([read_run(folder)])["ledger"])
    assert re.search(r"does not hold: all: line 2 has changed", html)
    assert "<b>" not in html


def test_a_run_without_a_ledger_has_no_section(tmp_path):
    fa.Experiment(arms=["all"], **SETTINGS).run(tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert "ledger" not in str(render_parts([run])["ledger"])
    (arm,) = page_data([run])["runs"][0]["arms"]
    assert "gave" not in arm["seeds"][0]["clients"][0]
