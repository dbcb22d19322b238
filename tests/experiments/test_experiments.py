"""Experiments end to end: settings, output, resume after a kill, divergence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import blobs
from safetensors.torch import load_file, save_file

from fedalign import FedalignError, cli
from fedalign.experiments import recorders, tensor_files
from fedalign.experiments.config import load, shipped
from fedalign.experiments.store import RunStore
from fedalign.protocol.records import RoundRecord

SMALL = """
name = "small"
rounds = {rounds}
seeds = 2
arms = ["priority", "all", "local", "fedalign", "wide"]
epsilon = {{ schedule = "linear", start = 1.0, end = 0.1 }}
[data]
kind = "synth"
priority = 3
free = 4
samples = 60
test_samples = 40
[model]
kind = "logistic"
inputs = 60
classes = 10
[local]
lr = 0.1
epochs = 2
batch_size = 20
[participation]
kind = "bernoulli"
p = 0.8
[arm.wide]
rule = "fedalign"
epsilon = 2.0
mu = 0.1
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(rounds=12))
    return path


def run(*arguments):
    return cli.main(["run", *map(str, arguments), "--quiet", "--device", "cpu"])


def logs(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("rounds.jsonl"))}


def weights(folder):
    return {str(p.relative_to(folder)): load_file(p) for p in sorted(Path(folder).rglob("model.safetensors"))}


def assert_same(first, second):
    assert logs(first) == logs(second)
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    assert one
    for name in one:
        assert one[name].keys() == two[name].keys()
        for key in one[name]:
            assert torch.equal(one[name][key], two[name][key])


def test_shipped_experiments_are_valid_and_as_specified():
    for name, skew, epsilon in (("synth-low", 0.5, 0.2), ("synth-medium", 1.5, 0.2), ("synth-high", 5.0, 0.4)):
        experiment = load(name)
        settings = experiment.settings
        assert (settings["rounds"], settings["seeds"], settings["warmup"], settings["epsilon"]) == (
            200,
            5,
            0.1,
            epsilon,
        )
        assert (settings["data"]["label_skew"], settings["data"]["random_skew"]) == (skew, skew)
        assert settings["local"]["lr"] == 0.1
        assert settings["local"]["epochs"] == 5
        assert settings["match_on"] == "heldout"
    assert set(shipped()) >= {"synth-low", "synth-medium", "synth-high"}


@pytest.mark.pictures
def test_the_output_keeps_its_contract(small, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(small, "--out", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    config = tomllib.loads((out / "config.toml").read_text())
    assert config["local"]["momentum"] == 0.0  # defaults are written out
    summary = json.loads((out / "summary.json").read_text())
    assert {"experiment", "rounds", "seeds", "device", "seconds", "arms"} <= summary.keys()
    assert list(summary["arms"]) == ["priority", "all", "local", "fedalign", "wide"]
    for arm, figures in summary["arms"].items():
        assert {"test_accuracy", "test_loss", "admitted_mean", "models_up", "models_down"} <= figures.keys()
        per_seed = []
        for seed in (0, 1):
            folder = out / arm / f"seed-{seed}"
            lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
            assert [line["round"] for line in lines] == list(range(12))
            for line in lines:
                assert {"epsilon", "global_loss", "global_accuracy", "test_accuracy", "test_loss"} <= line.keys()
                for client in line["clients"]:
                    keys = {"id", "priority", "reachable", "loss", "accuracy", "decision", "weight"}
                    assert keys <= client.keys()
                shares = sum(client["weight"] for client in line["clients"])
                assert shares == pytest.approx(0 if arm == "local" else 1)
            per_seed.append(np.mean([line["test_accuracy"] for line in lines[-10:]]))
        assert figures["test_accuracy"]["per_seed"] == pytest.approx(per_seed)
        assert figures["test_accuracy"]["mean"] == pytest.approx(np.mean(per_seed))
        assert figures["test_accuracy"]["std"] == pytest.approx(np.std(per_seed, ddof=1))
    assert summary["arms"]["priority"]["models_up"] == 12 * 3
    assert summary["arms"]["local"]["models_down"] == 0
    tensors = load_file(out / "fedalign" / "seed-0" / "model.safetensors")
    assert {key: tuple(t.shape) for key, t in tensors.items()} == {"1.weight": (10, 60), "1.bias": (10,)}
    alone = load_file(out / "local" / "seed-0" / "model.safetensors")
    assert tuple(alone["free-2.1.bias"].shape) == (10,)
    for name in ("accuracy.png", "accuracy.pdf", "loss.png", "loss.pdf", "admitted-fedalign.png", "report.html"):
        assert (out / name).stat().st_size > 1000


def test_the_same_seed_twice(small, tmp_path):
    assert run(small, "--out", tmp_path / "a") == run(small, "--out", tmp_path / "b") == 0
    assert_same(tmp_path / "a", tmp_path / "b")


def test_arms_do_not_change_each_other(small, tmp_path):
    assert run(small, "--out", tmp_path / "a") == 0
    assert run(small, "--out", tmp_path / "b", "--arms", "wide,priority", "--seeds", "1") == 0
    for arm in ("wide", "priority"):
        decisions = [
            [[c["decision"] for c in json.loads(line)["clients"]] for line in path.read_text().splitlines()]
            for path in (tmp_path / x / arm / "seed-0" / "rounds.jsonl" for x in "ab")
        ]
        assert decisions[0] == decisions[1]


def start(small, out):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [
        sys.executable,
        "-m",
        "fedalign",
        "run",
        str(small),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_after(process, log, lines):
    """Kill without warning, once so many rounds are on disk: somewhere in the middle of a later one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    small = tmp_path / "small.toml"
    small.write_text(SMALL.format(rounds=150))
    assert run(small, "--out", tmp_path / "whole") == 0
    out = tmp_path / "killed"
    log = out / "wide" / "seed-1" / "rounds.jsonl"
    for lines in (5, 40):
        process = start(small, out) if lines == 5 else subprocess.Popen(
            [sys.executable, "-m", "fedalign", "run", str(small), "--out", str(out), "--device", "cpu", "--resume"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        kill_after(process, log, lines)
        assert not (out / "summary.json").exists()
    assert run(small, "--out", out, "--resume") == 0
    assert_same(tmp_path / "whole", out)
    figures = [json.loads((tmp_path / x / "summary.json").read_text())["arms"] for x in ("whole", "killed")]
    assert figures[0] == figures[1]


class BrokenOffError(Exception):
    pass


def stop_after(monkeypatch, arm, seed, rounds):
    """Break off right after one run's round was stored, so that runs are left at different rounds."""
    original = RunStore.checkpoint

    def checkpoint(self, mark, snapshot):
        original(self, mark, snapshot)
        if self.folder.parts[-2:] == (arm, f"seed-{seed}") and mark.rounds == rounds:
            raise BrokenOffError

    monkeypatch.setattr(RunStore, "checkpoint", checkpoint)
    return original


def break_off(small, out, monkeypatch, arm="all", rounds=6):
    with monkeypatch.context() as patch:
        stop_after(patch, arm, 0, rounds)
        with pytest.raises(BrokenOffError):
            run(small, "--out", out)


def test_runs_left_at_different_rounds_go_on_together(small, tmp_path, monkeypatch):
    assert run(small, "--out", tmp_path / "whole") == 0
    break_off(small, tmp_path / "cut", monkeypatch)
    counts = {len(log.splitlines()) for log in logs(tmp_path / "cut").values()}
    assert counts == {5, 6}
    assert run(small, "--out", tmp_path / "cut", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_checkpoint_of_version_0_1_is_refused(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "cut"
    break_off(small, out, monkeypatch, arm="wide")
    path = out / "fedalign" / "seed-0" / "checkpoint.safetensors"
    state = torch.arange(4.0)
    info = {"rounds": "6", "offset": "100", "log": "0" * 64, "state": "0" * 64}
    save_file({"state": state}, path, info)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert cli.main(["run", str(small), "--out", str(out), "--resume", "--device", "cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("fedalign: ") == 1
    assert (
        "seed-0/checkpoint.safetensors was written by fedalign 0.1, whose checkpoints this version cannot read" in said
    )
    assert said.endswith("finish that run with fedalign 0.1, or start it again in another folder")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    with pytest.raises(FedalignError, match=r"was written by fedalign 0\.1"):
        RunStore(path.parent).checkpoints()


@pytest.mark.parametrize("credit", [None, "true", "false"])
def test_a_run_of_auto_that_version_0_1_began_goes_on_with_no_other_fallback(small, tmp_path, capsys, credit):
    small.write_text(small.read_text().replace('"wide"]', '"auto"]').replace("rounds = 12", "rounds = 3"))
    out = tmp_path / "out"
    assert run(small, "--seeds", "1", "--out", out) == 0
    for path in out.rglob("checkpoint.safetensors"):
        save_file(
            {"state": torch.arange(4.0)}, path, {"rounds": "2", "offset": "9", "log": "0" * 64, "state": "0" * 64}
        )
    capsys.readouterr()
    given = ["--set", f"arm.auto.credit={credit}"] if credit else []
    assert cli.main(["run", str(small), "--seeds", "1", "--out", str(out), "--resume", "--device", "cpu", *given]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("arm.auto.credit was None" if credit else "was written by fedalign 0.1") in said


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "missing log line", "changed log line"])
def test_a_damaged_checkpoint_falls_back_and_says_so(small, tmp_path, monkeypatch, capsys, damage):
    assert run(small, "--out", tmp_path / "whole") == 0
    out = tmp_path / "cut"
    break_off(small, out, monkeypatch, arm="wide")
    path = out / "fedalign" / "seed-0" / "checkpoint.safetensors"
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(raw[:-100])
    elif damage == "flip":
        raw[-10] ^= 1
        path.write_bytes(raw)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "changed log line":
        log = path.with_name("rounds.jsonl")
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"1", b"2"))
    else:
        log = path.with_name("rounds.jsonl")
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:5]))
    capsys.readouterr()
    assert cli.main(["run", str(small), "--out", str(out), "--resume", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint.safetensors cannot be used" in said
    assert "going on from round 5" in said
    assert_same(tmp_path / "whole", out)


@pytest.mark.slow
def test_both_checkpoints_damaged_starts_that_run_again(small, tmp_path, monkeypatch, capsys):
    assert run(small, "--out", tmp_path / "whole") == 0
    out = tmp_path / "cut"
    break_off(small, out, monkeypatch)
    for name in ("checkpoint.safetensors", "checkpoint-previous.safetensors"):
        (out / "priority" / "seed-1" / name).write_bytes(b"junk")
    assert cli.main(["run", str(small), "--out", str(out), "--resume", "--device", "cpu"]) == 0
    assert "this run starts again" in " ".join(capsys.readouterr().err.split())
    history = RunStore(out / "priority" / "seed-1").history()
    assert [r.round for r in history.rounds] == list(range(12))


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written(small, tmp_path, monkeypatch):
    """Break off between the two renames of a checkpoint, and in the middle of writing one."""
    assert run(small, "--out", tmp_path / "whole") == 0
    for case, victim in enumerate(("replace", "save_file")):
        out = tmp_path / f"cut-{case}"
        calls = []

        def broken(*arguments, calls=calls, original=tensor_files.save_file, **options):
            calls.append(1)
            if len(calls) == 33:
                Path(arguments[1]).write_bytes(b"half a che")
                raise BrokenOffError
            return original(*arguments, **options)

        def torn(self, target, calls=calls, original=Path.replace):
            if self.suffix == ".new" and self.name.startswith("checkpoint"):
                calls.append(1)
                if len(calls) == 33:
                    raise BrokenOffError
            return original(self, target)

        with monkeypatch.context() as patch:
            if victim == "replace":
                patch.setattr(Path, "replace", torn)
            else:
                patch.setattr(tensor_files, "save_file", broken)
            with pytest.raises(BrokenOffError):
                run(small, "--out", out)
        assert run(small, "--out", out, "--resume") == 0
        assert_same(tmp_path / "whole", out)


def test_a_diverged_run_stays_diverged_after_a_kill(small, tmp_path, monkeypatch):
    text = small.read_text().replace('"wide"]', '"wide", "wild"]') + '[arm.wild]\nrule = "all"\nlr = 1e38\n'
    small.write_text(text)
    assert run(small, "--out", tmp_path / "whole") == 3
    break_off(small, tmp_path / "cut", monkeypatch, arm="wide", rounds=8)
    assert RunStore(tmp_path / "cut" / "wild" / "seed-0").diverged()
    assert run(small, "--out", tmp_path / "cut", "--resume") == 3
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_settings_reach_the_runs(small, tmp_path):
    text = small.read_text().replace('"wide"]', '"wide", "late", "strict", "literal"]')
    text += '[arm.late]\nrule = "all"\nwarmup = 6\n[arm.strict]\nrule = "fedalign"\nmatch = "accuracy"\nepsilon = 0.1\n'
    text += '[arm.literal]\nrule = "fedalign"\nmatch_on = "train"\n'
    small.write_text(text)
    assert run(small, "--out", tmp_path / "out", "--seeds", 1) == 0
    histories = {
        arm: RunStore(tmp_path / "out" / arm / "seed-0").history() for arm in ("late", "strict", "literal", "fedalign")
    }
    assert [r.warmup for r in histories["late"].rounds] == [True] * 6 + [False] * 6
    for r in histories["strict"].rounds:
        for c in r.clients:
            if c.decision == "admitted":
                assert abs(c.accuracy - r.global_accuracy) <= 0.1 + 1e-9
    assert histories["literal"][0].global_loss != histories["fedalign"][0].global_loss
    specs = {arm: spec for arm, _, spec in load(str(small)).specs()}
    assert (specs["wide"].local.mu, specs["all"].local.mu) == (0.1, 0.0)
    assert (specs["literal"].rule.match_on, specs["strict"].rule.on) == ("train", "accuracy")


def test_resuming_a_finished_run_changes_nothing(small, tmp_path):
    assert run(small, "--out", tmp_path / "a") == 0
    before = logs(tmp_path / "a")
    assert run(small, "--out", tmp_path / "a", "--resume") == 0
    assert logs(tmp_path / "a") == before
    # A run of an earlier version, which didn't have some setting yet.
    config = tmp_path / "a" / "config.toml"
    config.write_text(config.read_text().replace("theory = false\n", "").replace("fresh = false\n", ""))
    assert run(small, "--out", tmp_path / "a", "--resume") == 0


def test_divergence_ends_that_run_and_no_other(small, tmp_path, capsys):
    text = small.read_text().replace('"wide"]', '"wide", "wild"]') + '[arm.wild]\nrule = "all"\nlr = 1e38\n'
    small.write_text(text)
    out = tmp_path / "out"
    assert run(small, "--out", out) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert "wild, seed 0: training diverged in round" in error
    assert "priority-0" in error
    summary = json.loads((out / "summary.json").read_text())
    assert summary["arms"]["wild"]["test_accuracy"]["per_seed"] == [None, None]
    assert set(summary["arms"]["wild"]["diverged"]) == {"0", "1"}
    assert len(RunStore(out / "priority" / "seed-0").history()) == 12
    assert not (out / "wild" / "seed-0" / "model.safetensors").exists()
    assert "diverged" in (out / "report.html").read_text()
    # The others are what they are without the wild arm, and a resume tells the same story.
    assert run(small, "--out", tmp_path / "tame", "--arms", "priority,all,local,fedalign,wide") == 0
    tame = logs(tmp_path / "tame")
    assert {k: [json.loads(x)["test_accuracy"] for x in v.splitlines()] for k, v in tame.items()} == {
        k: [json.loads(x)["test_accuracy"] for x in v.splitlines()] for k, v in logs(out).items() if "wild" not in k
    }
    assert run(small, "--out", out, "--resume") == 3


def test_simulate_raises_when_it_diverges():
    import fedalign as fa

    fed = fa.Federation.from_arrays([blobs(20, 1), blobs(10, 2)], priority=[True, False])
    with pytest.raises(fa.DivergedError, match=r"round \d+ at client\(s\) 0") as caught:
        fa.simulate(fed, lambda: torch.nn.Linear(6, 4), rounds=9, local=fa.LocalSGD(lr=1e38, epochs=3, batch_size=5))
    assert len(caught.value.history) == caught.value.round


def test_interrupt_tells_how_to_go_on(small, tmp_path, monkeypatch, capsys):
    def interrupt(self, record):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunStore, "append", interrupt)
    assert run(small, "--out", tmp_path / "out") == 130
    assert "--resume" in capsys.readouterr().err


def test_fedprox_for_every_arm(small, tmp_path):
    assert run(small, "--out", tmp_path / "avg", "--seeds", 1) == 0
    assert run(small, "--out", tmp_path / "prox", "--seeds", 1, "--set", "local.mu=1") == 0
    for arm in ("priority", "all", "local", "fedalign"):
        one, two = (load_file(tmp_path / x / arm / "seed-0" / "model.safetensors") for x in ("avg", "prox"))
        assert any(not torch.equal(one[key], two[key]) for key in one)


def test_a_folder_of_npz_files_is_an_experiment(tmp_path):
    (tmp_path / "sites").mkdir()
    for k in range(4):
        x, y = blobs(30, k)
        np.savez(tmp_path / "sites" / f"site-{k}.npz", x=x, y=y, x_test=x, y_test=y)
    (tmp_path / "mine.toml").write_text(
        'rounds = 3\nseeds = 1\n[data]\nkind = "folder"\nfolder = "sites"\npriority = ["site-1"]\n'
        '[model]\nkind = "mlp"\ninputs = 6\nhidden = [5]\nclasses = 4\n[local]\nlr = 0.1\nsteps = 3\n'
    )
    assert run(tmp_path / "mine.toml") == 0
    record = RunStore(Path("runs/mine/fedalign/seed-0")).history()[0]
    assert [c.name for c in record.clients if c.priority] == ["site-1"]
    assert run(tmp_path / "mine.toml") == 0
    assert Path("runs/mine-2/summary.json").exists()
    assert run(tmp_path / "mine.toml", "--resume") == 0


def test_records_survive_json():
    record = RoundRecord(0, float("inf"), 1.0, None, None, float("nan"), None, False, "why", 1, 2, ())
    again = RoundRecord.from_json(record.to_json())
    assert again.epsilon == float("inf")
    assert again.test_loss is None
    assert again.skipped == "why"


@pytest.mark.slow
def test_large_models_are_checkpointed_less_often_but_an_interrupt_keeps_the_last_round(small, tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "_BYTES_A_ROUND", 1)
    written = []
    original = RunStore.checkpoint

    def checkpoint(self, mark, state):
        written.append(mark.rounds)
        original(self, mark, state)

    monkeypatch.setattr(RunStore, "checkpoint", checkpoint)
    assert run(small, "--out", tmp_path / "whole") == 0
    rounds = len(next(iter(logs(tmp_path / "whole").values())).splitlines())
    assert set(written) == {rounds}
    append = RunStore.append

    def stop(self, record):
        mark = append(self, record)
        if record.round == 4:
            raise KeyboardInterrupt
        return mark

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append", stop)
        assert run(small, "--out", tmp_path / "cut") == 130
    assert 4 in written
    assert run(small, "--out", tmp_path / "cut", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
