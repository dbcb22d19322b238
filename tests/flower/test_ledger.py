"""The ledger over Flower: the server signs it, and each node is told its own account, and nothing of others."""

import json
from pathlib import Path

import in_process
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from in_process import DATA, model

import fedalign as fa
from fedalign.cli import main
from fedalign.flower.local_grid import LocalGrid
from fedalign.flower.node_log import NodeLog
from fedalign.flower.own_accounts import shown_account
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.server_app import Server
from fedalign.flower.settings import Settings
from fedalign.flower.wire import ACCOUNT
from fedalign.ledger.account import Account, accounts
from fedalign.ledger.chain import NAME, read_chain
from fedalign.ledger.receipt import own_account, read_account
from fedalign.ledger.signing import Signer

FREE = range(3, 7)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Give a function that runs a federation of six nodes in this process, two of them priority clients."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fedalign.report.page.gallery", lambda run: [])

    def run(answer=None, out="out", **settings):
        config = {
            "model": "in_process:model", "data": "in_process:data", "roster": str(tmp_path / "roster.toml"),
            "out": str(tmp_path / out), "rounds": 4, "warmup": 0, "epsilon": 2.0, "trust": "report", "longest": 0.0,
            "wait": 0.0, "epochs": 2, "batch-size": 20, "ledger": True,
            **settings,
        }  # fmt: skip
        nodes = {k: {"partition-id": k - 1, "log": str(tmp_path / f"node-{k}.jsonl")} for k in range(1, 7)}
        grid = LocalGrid(nodes, config) if answer is None else LocalGrid(nodes, config, answer=answer)
        entries = (Entry(fingerprint(key), f"site-{k}", k <= 2) for k, key in grid.keys.items())
        RosterFile(tuple(entries)).write(tmp_path / "roster.toml")
        Server(grid, Settings.read(config), run_id=7).run()
        return tmp_path / out

    return run


def test_the_server_signs_with_its_key(start, tmp_path, capsys):
    folder = start()
    key = tmp_path / "home" / ".fedalign" / "ledger.key"
    public = Signer.read(key).public
    chain = read_chain(folder / NAME, public)
    assert chain.broken is None
    assert len(chain.rows) == 4
    (tmp_path / "ledger.pub").write_text(public)
    assert main(["ledger", "verify", str(folder), "--key", str(tmp_path / "ledger.pub")]) == 0
    assert "signed by the key" in " ".join(capsys.readouterr().out.split())
    path = folder / NAME
    path.write_bytes(path.read_bytes().replace(b'"name":"site-3"', b'"name":"site-9"', 1))
    assert main(["ledger", "verify", str(folder)]) == 1
    named = start(out="named", ledger={"key": str(key), "method": "leave-one-out"})
    assert read_chain(named / NAME, public).about["method"] == "leave-one-out"


@pytest.mark.parametrize(("name", "rule"), [("fedalign", fa.Align(2.0)), ("meritfed", fa.MeritFed())])
def test_the_ledger_is_the_simulations(start, name, rule):
    mine = accounts(read_chain(start(rule=name) / NAME).rows)
    sgd = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    expected = fa.simulate(
        DATA.federation(seed=0), model, rule, 4, 0, sgd, device="cpu", free_cap=1.0, ledger=True, out="sim"
    )
    assert len(expected.history) == 4
    theirs = accounts(read_chain(Path("sim") / NAME).rows)
    for k, one in theirs.items():
        assert mine[k].gave == pytest.approx(one.gave, abs=1e-4)
        assert mine[k].unvalued == 0
        assert (mine[k].used, mine[k].refused.total()) == (one.used, one.refused.total())


def test_each_node_has_its_own_account_alone(start, tmp_path, capsys):
    folder = start(epsilon=0.4)
    found = accounts(read_chain(folder / NAME).rows)
    for k in range(1, 7):
        log = tmp_path / f"node-{k}.jsonl"
        (text,) = (line["account"] for line in NodeLog(log).lines() if "account" in line)
        row, who = read_account(text)
        assert (row["client"], row["gave"], row["used"]) == (f"site-{k}", found[k - 1].gave, found[k - 1].used)
        assert who.startswith("signed by the key")
        assert row["previous"] == read_chain(folder / NAME).last
        assert not any(f"site-{j}" in text for j in range(1, 7) if j != k)
        assert main(["flower", "mine", str(log)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"gave {found[k - 1].gave:+.4g}" in shown
        for reason in found[k - 1].refused:
            assert reason in shown
        assert main(["flower", "mine", str(log), "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)
        assert run["account"]["gave"] == found[k - 1].gave
    assert any(found[k - 1].refused for k in FREE)


def test_an_account_is_a_receipt(start, tmp_path, capsys):
    """The ledger must have the round that it names, and the same totals up to there; extending a run keeps both."""
    folder, log = start(rounds=3), tmp_path / "node-3.jsonl"
    short = (folder / NAME).read_bytes()
    check = ["ledger", "verify", str(folder), "--account", str(log)]
    assert main(check) == 0
    assert f"last hash {read_chain(folder / NAME).last}" in capsys.readouterr().out
    assert main(["flower", "mine", str(log)]) == 0
    assert read_chain(folder / NAME).last in capsys.readouterr().out
    first = log.read_bytes()
    start(rounds=5, resume=str(folder))
    assert main(check) == 0
    (tmp_path / "first.jsonl").write_bytes(first)
    assert main([*check[:-1], str(tmp_path / "first.jsonl")]) == 0
    (folder / NAME).write_bytes(short)  # as it was once signed: its chain holds, and two rounds are gone
    assert main(check) == 1
    assert "has no line with the hash" in capsys.readouterr().out
    assert main([*check[:-1], str(folder / "rounds.jsonl")]) == 2
    assert main(["ledger", str(folder), "--account", str(log)]) == 2


def test_the_ledger_of_another_federation_is_not_taken_for_this_one(start, capsys):
    folder, other = start(rounds=2), start(rounds=2, out="other", name="other")
    for name in (NAME, "rounds.jsonl"):
        (folder / name).write_bytes((other / name).read_bytes())
    assert main(["ledger", "verify", str(other)]) == 0
    assert main(["ledger", "verify", str(folder)]) == 1
    assert "its experiment is 'other', not 'flower'" in " ".join(capsys.readouterr().out.split())


def test_totals_of_a_broken_ledger_are_not_signed(start, tmp_path):
    def meddling(node, message, answer):
        for path in tmp_path.glob("out/" + NAME):
            path.write_bytes(path.read_bytes().replace(b'"decision":"trained"', b'"decision":"refused"'))
        return answer()

    folder = start(meddling)
    events = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    (event,) = (e for e in events if e["event"] == "accounts_withheld")
    assert "line 2 has changed" in event["details"]["reason"]
    assert not any("account" in line for line in NodeLog(tmp_path / "node-3.jsonl").lines())


def test_nothing_that_a_node_reports_enters_its_score(start):
    """Free nodes that report other losses of their own, and send the same updates, are worth the same."""

    def lying(node, message, answer):
        reply = answer()
        if node in FREE and message.metadata.message_type == "train":
            values = dict(reply.content["measures"])
            reply.content["measures"] = MetricRecord({**values, "own.loss": 0.5 * values["own.loss"]})
        return reply

    honest, dishonest = (
        accounts(read_chain(start(answer, out, rule="all") / NAME).rows)
        for answer, out in ((None, "honest"), (lying, "lying"))
    )
    assert [one.gave for one in honest.values()] == [one.gave for one in dishonest.values()]
    assert honest[3].got != dishonest[3].got


def test_a_node_that_answers_wrongly_changes_nothing(start):
    def chatty(node, message, answer):
        if message.metadata.message_type == ACCOUNT and node in FREE:
            return Message(RecordDict({"gave": ConfigRecord({"value": 99.0})}), reply_to=message)
        return answer()

    folder = start(chatty)
    assert read_chain(folder / NAME).broken is None
    events = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("account_not_sent") == 4


def test_a_run_that_is_continued_keeps_one_chain(start, tmp_path):
    folder = start(rounds=3)
    start(rounds=5, resume=str(folder))
    chain = read_chain(folder / NAME, Signer.own(tmp_path / "home" / ".fedalign" / "ledger.key").public)
    assert chain.broken is None
    assert len(chain.rows) == 5


def test_a_changed_account_is_not_believed(tmp_path):
    signer = Signer.own(tmp_path / "key")
    text = own_account(Account("site-3", False, gave=0.5), "0" * 64, signer)
    assert read_account(text) is not None
    for changed in (text.replace("0.5", "0.9"), text[:-5], "[]", text.replace("site-3", "site-4"), 3):
        assert read_account(changed) is None
    assert shown_account("{}") == ["the server sent an account that cannot be read"]


def test_a_run_without_a_ledger_sends_no_account(start, tmp_path):
    folder = start(ledger=False)
    assert not (folder / NAME).exists()
    assert not any("account" in line for line in NodeLog(tmp_path / "node-3.jsonl").lines())
    assert in_process.history(tmp_path)[0].ledger is None
