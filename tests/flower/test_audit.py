"""The audit log is only added to, survives a cut line, and is on disk; so are checkpoints."""

import json
import os
from pathlib import Path

import torch

from fedalign.experiments.store import Mark, RunStore
from fedalign.flower import audit
from fedalign.protocol.messages import Snapshot


def synced(monkeypatch):
    """Collect the paths that are written to disk from here on, in order."""
    paths, real = [], os.fsync

    def fsync(descriptor):
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_events_are_added_and_never_changed(tmp_path, monkeypatch):
    paths = synced(monkeypatch)
    log = audit.AuditLog(tmp_path)
    log.add("run_started", rounds=5)
    first = (tmp_path / audit.NAME).read_bytes()
    log.round = 2
    log.add("benched", "site-3", rounds=4)
    again = audit.AuditLog(tmp_path)  # as a resumed run does
    again.add("run_resumed")
    assert (tmp_path / audit.NAME).read_bytes().startswith(first)
    events = audit.read(tmp_path)
    assert [event["event"] for event in events] == ["run_started", "benched", "run_resumed"]
    assert set(events[1]) == {"time", "event", "round", "client", "details"}
    assert (events[1]["round"], events[1]["client"], events[1]["details"]) == (2, "site-3", {"rounds": 4})
    assert paths == [audit.NAME, tmp_path.name, audit.NAME, audit.NAME]  # the folder, too, when the file is new


def test_a_line_that_a_kill_cut_short_harms_no_other(tmp_path):
    log = audit.AuditLog(tmp_path)
    log.add("one")
    with (tmp_path / audit.NAME).open("a") as file:
        file.write('{"time": "2026-')
    log.add("two")
    assert [event["event"] for event in audit.read(tmp_path)] == ["one", "two"]
    assert json.loads((tmp_path / audit.NAME).read_text().splitlines()[-1])["event"] == "two"


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    store = RunStore(tmp_path)
    store.log.write_text("{}\n")
    paths = synced(monkeypatch)
    store.checkpoint(Mark(1, 3, "0"), Snapshot(1, {"model": torch.ones(3)}))
    assert paths == ["rounds.jsonl", "checkpoint.new", tmp_path.name]
    paths.clear()
    store.save_model({"weight": torch.ones(3)})
    assert paths == ["model.new", tmp_path.name]
