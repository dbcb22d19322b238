"""``fedalign ledger verify``: what was cut off, taken away or put in another run's place, and lines of an odd form."""

import json
import shutil

import pytest

import fedalign as fa
from fedalign.cli import main
from fedalign.ledger.chain import NAME, START, closing_line, read_chain, write_line
from fedalign.ledger.verification import verify_folder

CLIENT = {
    "id": 3, "name": "c", "priority": False, "decision": "admitted", "reason": "", "weight": 0.5, "gave": 0.5,
    "low": 0.1, "high": 0.9, "copies": "", "loss": 1.0, "got": None,
}  # fmt: skip
FIRST = {"ledger": 2, "experiment": "", "arm": "all", "seed": 0, "method": "exact", "key": ""}
ROUND = {"round": 0, "loss": 1.0, "gain": 0.5, "free_gain": 0.5, "models": 3, "note": "", "clients": [CLIENT]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledgers") / "out"
    fa.Experiment(
        name="small", rounds=4, seeds=2, arms=["all", "fedalign", "local"], ledger="leave-one-out",
        data={"kind": "synth", "priority": 2, "free": 2, "samples": 40, "test_samples": 20},
        model={"kind": "logistic", "inputs": 60, "classes": 10}, local={"lr": 0.1, "epochs": 1},
    ).run(folder)  # fmt: skip
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def cut(path, lines):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def verified(folder, capsys):
    code = main(["ledger", "verify", str(folder)])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_finished_run_is_closed(folder, capsys):
    code, out = verified(folder, capsys)
    assert (code, out.count("holds:"), out.count("unfinished:")) == (0, 4, 0)
    chain = read_chain(folder / "all" / "seed-0" / NAME)
    assert (chain.closed, len(chain.rows)) == (True, 4)
    assert verified(folder / "all" / "seed-0", capsys)[0] == 0


def test_rounds_that_were_cut_off_in_both_files_are_missed(folder, capsys):
    run = folder / "all" / "seed-0"
    cut(run / NAME, 3)
    cut(run / "rounds.jsonl", 2)
    code, out = verified(folder, capsys)
    assert code == 1
    assert out.count("changed:") == 1
    for path in run.glob("*.safetensors"):  # what tells how many rounds there were
        path.unlink()
    code, out = verified(folder, capsys)
    assert "2 rounds, not signed" in out
    assert "; its end is not proven, because no line closes it" in out


def test_a_ledger_that_was_cut_beside_no_rounds_is_missed(folder, capsys):
    run = folder / "all" / "seed-0"
    (run / "rounds.jsonl").unlink()
    code, out = verified(folder, capsys)
    assert code == 0
    assert "rounds.jsonl is missing, so that values were not compared" in out
    cut(run / NAME, 3)
    code, out = verified(folder, capsys)
    assert (code, "the line that closes the ledger is gone" in out) == (1, True)


@pytest.mark.parametrize("stripped", [True, False])
def test_a_ledger_that_was_taken_away_is_missed(folder, capsys, stripped):
    run = folder / "all" / "seed-0"
    (run / NAME).unlink()
    if stripped:
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        for row in rows:
            del row["ledger"]
        (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (run / "rounds.jsonl").unlink()
    code, out = verified(folder, capsys)
    assert code == 1
    assert "all/seed-0: the ledger is missing, and config.toml asks for one" in out.replace(" /", "/")
    shutil.rmtree(run)
    assert verified(folder, capsys)[0] == 1


@pytest.mark.parametrize(("other", "why"), [("all/seed-1", "its seed is 1"), ("fedalign/seed-0", "its arm is")])
def test_the_ledger_of_another_run_is_not_taken_for_this_one(folder, capsys, other, why):
    for name in (NAME, "rounds.jsonl"):
        shutil.copy(folder / other / name, folder / "all" / "seed-0" / name)
    code, out = verified(folder, capsys)
    assert code == 1
    assert f"line 1 is that of another run: {why}" in out


def test_a_damaged_run_does_not_hide_the_others(folder, capsys):
    log = folder / "all" / "seed-0" / "rounds.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"garbage\n", *lines[2:]]))
    code, out = verified(folder, capsys)
    assert (code, out.count("changed:"), out.count("holds:")) == (1, 1, 3)
    assert "line 2 is damaged" in out


def test_a_missing_end_of_line_is_found(folder, capsys):
    path = folder / "all" / "seed-0" / NAME
    path.write_bytes(path.read_bytes()[:-1])
    code, out = verified(folder, capsys)
    assert code == 1
    assert "line 6 was cut short: its end is missing" in out


def test_a_ledger_of_an_earlier_version_is_read_and_its_end_is_not_proven(folder, capsys):
    path = folder / "all" / "seed-0" / NAME
    lines = [json.loads(line) for line in path.read_bytes().splitlines()[:-1]]
    lines[0]["ledger"] = 1
    write(path, [{k: v for k, v in line.items() if k not in ("previous", "hash")} for line in lines])
    code, out = verified(folder, capsys)
    assert code == 0
    assert "unfinished:" in out
    assert main(["ledger", str(folder)]) == 0


def write(path, rows, closed=None):
    texts, last = [], START
    for row in rows:
        texts.append(write_line(row, last))
        last = json.loads(texts[-1])["hash"]
    if closed is not None:
        texts.append(closing_line(closed, last))
    path.write_bytes(b"".join(text + b"\n" for text in texts))


@pytest.mark.parametrize(
    ("rows", "line", "why"),
    [
        ([{"ledger": 1}, {"round": 0}], 1, "it has no 'experiment'"),
        ([{**FIRST, "ledger": 99}], 1, "has the format 99, and this version reads 1 and 2"),
        ([{**FIRST, "seed": None}], 1, "it has None as 'seed'"),
        ([{**FIRST, "key": "-----BEGIN x"}], 1, "names a key that cannot be read"),
        ([{**FIRST, "key": 7}], 1, "it has 7 as 'key'"),
        ([FIRST, {"round": 0}], 2, "it has no 'loss'"),
        ([FIRST, {**ROUND, "clients": [{"id": 1}]}], 2, "it has no 'name'"),
        ([FIRST, {**ROUND, "clients": [7]}], 2, "it has the client 7"),
        ([FIRST, {**ROUND, "clients": [{**CLIENT, "id": [1]}]}], 2, "it has [1] as 'id'"),
        ([FIRST, {**ROUND, "clients": [{**CLIENT, "gave": "1e9"}]}], 2, "it has '1e9' as 'gave'"),
        ([FIRST, {**ROUND, "clients": [{**CLIENT, "gave": 10**400}]}], 2, "as 'gave'"),
        ([FIRST, {**ROUND, "clients": [{**CLIENT, "low": None}]}], 2, "a part of a value"),
        ([FIRST, {**ROUND, "round": 1}], 2, "is out of order"),
        ([FIRST, ROUND, {"closed": 2}], 3, "closes the ledger after 2 rounds, not 1"),
        ([FIRST, ROUND, {"closed": 1}, {**ROUND, "round": 1}], 4, "the line before closes the ledger"),
    ],
)
def test_a_line_of_an_odd_form_is_broken_though_its_hash_holds(tmp_path, capsys, rows, line, why):
    write(tmp_path / NAME, rows)
    (verdict,) = verify_folder(tmp_path)
    assert verdict.state == "changed"
    assert verdict.why.startswith(f"line {line} ")
    assert why in verdict.why
    assert main(["ledger", str(tmp_path)]) == 0  # as far as it holds
    capsys.readouterr()


def test_a_stopped_run_is_closed_and_one_that_was_closed_early_is_not_proven(folder, capsys):
    run = folder / "all" / "seed-0"
    cut(run / NAME, 3)
    cut(run / "rounds.jsonl", 2)
    for path in run.glob("*.safetensors"):
        path.unlink()
    with (run / NAME).open("ab") as file:
        file.write(closing_line(2, read_chain(run / NAME).last) + b"\n")
    assert "its end is not proven: it was closed after 2 of 4 rounds" in verified(folder, capsys)[1]
    (run / "stopped.json").write_text('{"round": 1, "reason": "good enough"}')
    code, out = verified(folder, capsys)
    assert (code, out.count("holds:")) == (0, 4)
