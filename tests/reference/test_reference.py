"""The reference set gives what version 0.1 gave: to the bit where the machine rounds as that of a record did."""

import functools
import json
from pathlib import Path

import pytest
from results import choose_record, commands, differences, read

from fedalign.cli import main

FILES = [Path(__file__).with_name(name) for name in ("results-0.1.json", "results-0.1-avx512.json")]
SHORT = ["uniform", "replacement", "scaffold", "fedadam", "fedprox", "theory-quadratic"]


@functools.cache
def records():
    return [json.loads(file.read_text()) for file in FILES]


def check(name, folder, capsys, seeds=2):
    """Run one name of the set with its first seeds, and compare it with the record."""
    out = folder / "out"
    settings = [*commands(folder)[name], "--seeds", str(seeds), "--device", "cpu", "--quiet", "--out", str(out)]
    code = main(["run", *settings])
    said = capsys.readouterr().err
    if code == 2 and "fedalign data get" in said:
        pytest.skip(f"the data of {name} is not on this machine")
    assert code == 0, said
    record, exact = choose_record(records(), name)
    wanted = {key: one for key, one in record["runs"][name].items() if int(key.partition("/seed-")[2]) < seeds}
    assert wanted
    found = differences(wanted, read(out, record["keys"]), exact)
    how = "bit for bit" if exact else "early figures only, because this machine rounds otherwise than the records'"
    assert not found, f"{how}: {found}"


@pytest.mark.parametrize("name", SHORT)
def test_the_first_seed_is_as_in_version_0_1(name, tmp_path, capsys):
    check(name, tmp_path, capsys, seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(records()[0]["runs"]))
def test_results_are_those_of_version_0_1(name, tmp_path, capsys):
    check(name, tmp_path, capsys)


def test_a_difference_is_found():
    one = {"decisions": "a", "values": "b", "weights": "c", "early": [[1.0, None, 0.5, 2.0]]}
    bits, near = {**one, "weights": "d"}, {**one, "early": [[1.01, None, 0.5, 2.0]]}
    far = {**one, "early": [[2.0, None, 0.5, 2.0]]}
    assert differences({"run": one}, {"run": one}, exact=True) == []
    assert differences({"run": one}, {"run": bits}, exact=True) == ["run: weights differ"]
    assert differences({"run": one}, {"run": {**near, **{"weights": "d"}}}, exact=False) == []
    assert differences({"run": one}, {"run": far}, exact=False) == [f"run: {one['early']} became {far['early']}"]
    assert differences({"run": one}, {}, exact=False) == ["run is missing"]


def test_the_record_of_a_machine_that_rounds_alike_is_chosen(monkeypatch):
    for record in records():
        monkeypatch.setattr("results.fingerprint", lambda of=record: of["fingerprint"])
        assert choose_record(records(), "uniform") == (record, True)
    monkeypatch.setattr("results.fingerprint", lambda: "another")
    chosen, exact = choose_record(records(), "uniform")
    assert not exact
    assert all("early" in one for runs in chosen["runs"].values() for one in runs.values())
