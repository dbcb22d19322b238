"""Nothing is lost: one process at a time writes a folder, damage is noticed, and files have ordinary permissions."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import interrupted_before

from fedalign import cli
from fedalign.errors import FedalignError
from fedalign.experiments import folder_lock
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.output_folder import locked_folder
from fedalign.experiments.store import RunStore

HOLD = """
import sys, time
from pathlib import Path
from fedalign.experiments.folder_lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""
SMALL = """
rounds = {rounds}
seeds = 1
arms = ["priority", "fedalign"]
[data]
kind = "synth"
samples = 20
test_samples = 10
[model]
kind = "logistic"
inputs = 60
classes = 10
[local]
lr = 0.1
epochs = 1
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(rounds=4))
    return path


def run(*arguments):
    return cli.main(["run", *map(str, arguments), "--quiet", "--device", "cpu"])


def refusal(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("fedalign: ") == 1
    return said


@pytest.fixture
def holder(tmp_path):
    """A real process that holds the folder ``held``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "held")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_another_process_writes_is_refused_at_once(small, holder, capsys):
    for command in (
        ["run", small, "--out", "held"],
        ["run", small, "--out", "held", "--resume"],
        ["redteam", "trust-synth", "--out", "held", "--rounds", "2", "--seeds", "1", "--attacks", "zero"],
    ):
        said = refusal(capsys, *command)
        assert f"held is being written by process {holder.pid} on {os.uname().nodename} since " in said
        assert said.endswith("wait until it has ended, or choose another folder")
        assert [path.name for path in Path("held").iterdir()] == [folder_lock.NAME]


def test_a_killed_process_leaves_no_lock_that_blocks(small, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert Path("held", folder_lock.NAME).exists()
    assert run(small, "--out", "held") == 0
    assert not Path("held", folder_lock.NAME).exists()


def test_a_lock_file_of_anything_else_blocks_nobody(small):
    Path("out").mkdir()
    text = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": "before the reboot"})
    Path("out", folder_lock.NAME).write_text(text)
    assert run(small, "--out", "out") == 0


def test_threads_of_one_process_exclude_each_other(tmp_path):
    said = []

    def second():
        try:
            FolderLock(tmp_path / "out").acquire()
        except FedalignError as error:
            said.append(str(error))

    with FolderLock(tmp_path / "out") as lock, FolderLock(tmp_path / "out"):
        lock.release()  # the inner one still holds the folder
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(said) == 1
    assert f"process {os.getpid()}" in said[0]
    FolderLock(tmp_path / "out").acquire()


def test_an_empty_folder_is_removed_and_one_with_content_stays(tmp_path):
    with FolderLock(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    with FolderLock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_processes_without_a_folder_of_their_own_get_different_ones():
    with locked_folder(None, "x", False) as first:
        assert first.folder == Path("runs/x")
        assert locked_folder(None, "x", False).folder == Path("runs/x-2")


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    import fcntl

    def unsupported(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="this file system has no locks"), FolderLock(tmp_path / "out"):
        pass


@pytest.mark.slow
def test_a_second_process_does_not_disturb_the_first(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(SMALL.format(rounds=60))
    assert run(path, "--out", "whole") == 0
    command = [sys.executable, "-m", "fedalign", "run", str(path), "--out", "out", "--quiet", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        log, deadline = Path("out/fedalign/seed-0/rounds.jsonl"), time.monotonic() + 120
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # it must not end before the others have been refused
        for more in ([], ["--resume"]):
            second = subprocess.run([*command, *more], capture_output=True, text=True)
            assert second.returncode == 2
            assert f"process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
    found = {
        name: {p.relative_to(name): p.read_bytes() for p in Path(name).rglob("*") if p.is_file()}
        for name in ("whole", "out")
    }
    assert found["whole"].keys() == found["out"].keys()
    for file in found["whole"]:
        if file.suffix in (".jsonl", ".safetensors", ".toml") or file.name == "clients.json":
            assert found["whole"][file] == found["out"][file], file
    arms = [json.loads(found[name][Path("summary.json")])["arms"] for name in found]
    assert arms[0] == arms[1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [*lines[:3], *lines[2:]], "repeats round 2 (line 4)"),
        (lambda lines: [*lines[:2], *lines[3:]], "lacks round 2 (line 3)"),
        (lambda lines: lines[1:], "lacks round 0 (line 1)"),
    ],
)
def test_repeated_and_missing_rounds_are_refused(small, monkeypatch, capsys, spoil, message):
    assert run(small, "--out", "done") == 0
    with interrupted_before(monkeypatch, 3):
        assert run(small, "--out", "cut") == 130
    for name in ("done", "cut"):
        log = Path(name, "fedalign", "seed-0", "rounds.jsonl")
        log.write_bytes(b"".join(spoil(log.read_bytes().splitlines(keepends=True))))
    for command in (["report", "done"], ["run", small, "--out", "done", "--resume"]):
        said = refusal(capsys, *command)
        assert message in said
        assert "delete the folder done/fedalign/seed-0 and continue with --resume" in said
    if "line 1" in message:  # at its end, the interrupted run's log is cut back to the checkpoint before
        assert message in refusal(capsys, "run", small, "--out", "cut", "--resume")
    whole = RunStore(Path("done/priority/seed-0")).log.read_bytes()
    for path in Path("done/fedalign/seed-0").iterdir():  # as the message says
        path.unlink()
    assert run(small, "--out", "done", "--resume") == 0
    assert len(RunStore(Path("done/fedalign/seed-0")).history()) == 4
    assert RunStore(Path("done/priority/seed-0")).log.read_bytes() == whole


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_files_have_ordinary_permissions(small, mask):
    before = os.umask(mask)
    try:
        assert run(small, "--out", "out") == 0
    finally:
        os.umask(before)
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert {"model.safetensors", "checkpoint.safetensors", "summary.json"} <= {path.name for path in files}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path
