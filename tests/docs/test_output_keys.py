"""docs/outputs.md names exactly the keys that real runs write: none is missing, and none is made up."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import pytest
from conftest import blobs

import fedalign as fa
from fedalign import cli
from fedalign.monitoring.status import ClientStatus, Quorum, Status, WaitingFor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "outputs.md"
NAMES = {"arms": "ARM", "incentive": "ARM", "best_by_arm": "ARM", "metrics": "NAME", "attacks": "NAME"}
NAMES |= {"stopped": "S", "diverged": "S", "hostile": "S", "keys": "KEY", "point": "KEY"}
NAMES |= {"waited": "NAME"}
OPEN = {"attacks.NAME", "theory.arms.ARM"}  # what is in these is documented elsewhere
EVERYTHING = """
rounds = 12
seeds = 2
arms = ["priority", "local", "fedalign", "auto", "fedalign-verified", "wild"]
metrics = { val_f1 = "f1(on='heldout')" }
callbacks = ["early-stopping(metric='global_loss', patience=2)", "best-round(metric='val_f1')"]
[data]
kind = "synth"
priority = 2
free = 3
samples = 60
test_samples = 30
[model]
kind = "logistic"
[local]
lr = 0.1
epochs = 1
[ledger]
method = "gtg-shapley"
[arm.wild]
rule = "all"
lr = 1e38
"""
PERSONAL = '[personal]\nmethods = ["refine(epochs=1)"]\nsave = true\n'
HOSTILE = '[adversary]\nkind = "backdoor"\nfraction = 0.4\n'


def documented(title):
    """Give the keys of a section's tables; a path that begins with a dot continues the one before."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#)", text + "\n#", re.MULTILINE | re.DOTALL)[2]
    found = []
    for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE):
        for path in re.findall(r"`([^`]+)`", row):
            found.append(found[-1].rpartition(".")[0] + path if path.startswith(".") else path)
    return set(found)


def paths(value, path=""):
    """List the paths of a JSON value, with names of arms, metrics, seeds and settings replaced by their letters."""
    found = {path} if path else set()
    if path in OPEN:
        return found
    if isinstance(value, dict):
        place = NAMES.get(path.rpartition(".")[2].removesuffix("[]"))
        if path in ("personal", "personal.ARM.free", "personal.ARM.priority", "[].personal"):
            place = "ARM" if path == "personal" else "METHOD"
        for key, inner in value.items():
            found |= paths(inner, f"{path}.{place or key}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        found.discard(path)
        for inner in value:
            found |= paths(inner, f"{path}[]")
        found.discard(f"{path}[]")
    return found


def compare(title, *values):
    real = set().union(*(paths(value) for value in values))
    named = documented(title)
    made_up = {path for path in named if path not in real}
    missing = {
        path for path in real if path not in named and not any(p.startswith((path + ".", path + "[")) for p in named)
    }
    assert (made_up, missing) == (set(), set()), title


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_paths_are_written_with_letters():
    text = {"arms": {"auto": {"stopped": {"1": "so"}}}, "clients": [{"id": 0}], "tried": []}
    assert paths(text) >= {"arms.ARM.stopped.S", "clients[].id", "tried"}
    assert {"clients[].name", "promise.alpha", "metrics.NAME.free"} <= documented("rounds.jsonl")


@pytest.mark.slow
def test_the_files_of_runs_have_the_keys_of_the_page(tmp_path):
    Path("everything.toml").write_text(EVERYTHING + HOSTILE + PERSONAL, encoding="utf-8")
    assert cli.main(["run", "everything.toml", "--out", "all", "--device", "cpu", "--quiet"]) == 3
    clients = {name: blobs(40, k) for k, name in enumerate("abc")}
    labelled = {name: (x, ["no" if label % 2 else "yes" for label in y.tolist()]) for name, (x, y) in clients.items()}
    fed = fa.Federation.from_clients(labelled, priority=["a"])
    experiment = fa.Experiment(fed, "logistic", ["priority", "fedalign"], rounds=3, seeds=1)
    fa.run(experiment, "own", report=False)
    run = ["run", "theory-quadratic", "--rounds", "3", "--seeds", "2", "--out", "theory", "--device", "cpu", "--quiet"]
    assert cli.main([*run, "--arms", "e0,auto"]) == 0
    assert cli.main([*run[:6], "--arms", "auto", "--out", "fails", "--device", "cpu", "--quiet"]) == 0
    summaries = [read(Path(name) / "summary.json") for name in ("all", "own", "theory", "fails")]
    compare("summary.json", *summaries)
    figures = [arm for summary in summaries for arm in summary.get("theory", {}).get("arms", {}).values()]
    compare("The theory in summary.json", *figures)
    compare("rounds.jsonl", *(record for path in Path().rglob("rounds.jsonl") for record in lines(path)))
    ledgers = [lines(path) for path in Path("all").rglob("ledger.jsonl")]
    assert "signature" not in ledgers[0][0]
    compare("ledger.jsonl", *(row for own in ledgers for row in own), {"signature": ""})
    compare("clients.json", *(read(path) for path in Path("all").rglob("clients.json")))
    compare("stopped.json", *(read(path) for path in Path("all").rglob("stopped.json")))
    compare("diverged.json", *(read(path) for path in Path("all").rglob("diverged.json")))
    settings = [tomllib.loads(path.read_text(encoding="utf-8")) for path in Path().glob("*/config.toml")]
    compare("config.toml", *(dict.fromkeys(table) for table in settings))
    known = {path.name for path in Path("all").rglob("*") if path.is_file() and path.suffix not in (".png", ".pdf")}
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in known if name.replace("refine", "METHOD") not in text]


def test_the_status_of_a_federation_has_the_keys_of_the_page():
    wait, quorum = WaitingFor("training", ("a",), 1.0), Quorum(1.0, 0.5, ("a",))
    status = Status(
        "running", 0, 5, "fedalign", "1", 0.0, 0.0, 3.0, quorum, waiting_for=wait, waited={"training": 1.0},
        clients=(ClientStatus(0, "a", True),),
    )  # fmt: skip
    compare("status.json", status.to_dict())


@pytest.mark.slow
def test_the_files_of_sweeps_and_red_teams_have_the_keys_of_the_page():
    Path("small.toml").write_text(EVERYTHING.replace("metrics =", "# ").replace("callbacks =", "# "), encoding="utf-8")
    common = ["--seeds", "2", "--rounds", "3", "--device", "cpu", "--quiet"]
    sweep = ["sweep", "small.toml", "--set", "epsilon=0.1,0.4", "--arms", "priority,fedalign", "--workers", "1"]
    assert cli.main([*sweep, "--out", "s", *common]) == 0
    compare("sweep.json", read(Path("s/sweep.json")))
    compare("results.jsonl of a sweep", *lines(Path("s/results.jsonl")))
    attack = ["redteam", "small.toml", "--rules", "all", "--attacks", "backdoor", "--fractions", "0.5", "--out", "r"]
    assert cli.main([*attack, *common]) == 0
    compare("redteam.json", read(Path("r/redteam.json")))
    compare("results.jsonl of a red team", *lines(Path("r/results.jsonl")))
    with Path("r/redteam.csv").open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    assert {f"results[].{column}" for column in columns} == {k for k in documented("redteam.json") if "results" in k}
