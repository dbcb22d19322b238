"""Verifies the ledgers of an output folder: which runs must have one, what each holds, and whether its end is proven.

A chain proves that no line within it has changed. What it cannot prove by itself is compared with the rest of the
folder: the run that the first line names with ``config.toml`` and the folder's name, the rounds with ``rounds.jsonl``,
and their number with the checkpoint. A ledger without a closing line may lack lines at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.arms import arm_table, trains_alone
from fedalign.experiments.config_file import read_settings
from fedalign.experiments.store import RunStore
from fedalign.ledger.chain import NAME, Broken, Chain, read_chain
from fedalign.ledger.entries import ROUND_KEYS, round_entry
from fedalign.ledger.folder import ledger_files

State = Literal["holds", "unfinished", "changed"]


@dataclass(frozen=True)
class KeptRun:
    """A run that keeps a ledger, or should. What is None is not known, and not compared.

    ``required`` says why there must be a ledger; it is empty where only the ledger itself tells of the run.
    ``extensible`` runs, those over Flower, may go on after their end.
    """

    folder: Path
    arm: str | None = None
    seed: int | None = None
    experiment: str | None = None
    rounds: int | None = None
    required: str = ""
    finished: bool = False  #: the summary of its experiment is there
    extensible: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is found of one ledger. ``why`` says what has changed, or what is not proven."""

    path: Path
    state: State
    why: str = ""
    chain: Chain | None = None


def verify_folder(folder: Path, key: str | None = None, arm: str | None = None) -> list[Verdict]:
    """Verify the ledgers of all runs in a folder, or of one ``arm``; a damaged run does not hide the others.

    ``key`` is the public key that must have signed them. Raises :class:`FedalignError` if there is no ledger, and none
    is missing.
    """
    return [verify_run(run, key) for run in kept_runs(folder) if arm in (None, run.arm) or run.arm is None]


def verify_run(run: KeptRun, key: str | None = None) -> Verdict:
    """Verify the ledger of one run."""
    path = run.folder / NAME
    if not path.is_file():
        if run.required and (run.finished or not RunStore(run.folder).is_empty()):
            return Verdict(run.folder, "changed", f"the ledger is missing, and {run.required}")
        return Verdict(run.folder, "unfinished", "the run has not begun, or was removed")
    try:
        chain = read_chain(path, key)
        broken = (
            chain.broken or _of_another_run(run, chain) or _unlike_rounds(run, chain) or _closing_line_gone(run, chain)
        )
        open_end = "" if broken is not None else _open_end(run, chain)
    except FedalignError as error:
        return Verdict(path, "changed", str(error))
    if broken is not None:
        return Verdict(path, "changed", str(broken), chain)
    alone = bool(chain.rows) and not (run.folder / "rounds.jsonl").exists()
    notes = [open_end] if open_end else []
    notes += ["rounds.jsonl is missing, so that values were not compared"] if alone else []
    return Verdict(path, "unfinished" if open_end else "holds", "; ".join(notes), chain)


def kept_runs(folder: Path) -> list[KeptRun]:
    """List the runs of a folder that keep a ledger, or must, by ``config.toml``, the ledgers and ``rounds.jsonl``.

    Raises :class:`FedalignError` if there are none, or if ``config.toml`` is damaged.
    """
    found = {run.folder: run for run in _by_settings(folder)}
    for path in ledger_files(folder):
        found.setdefault(path.parent, _by_name(path.parent))
    for log in (folder / "rounds.jsonl", *sorted(folder.glob("*/seed-*/rounds.jsonl"))):
        if log.parent not in found and log.is_file() and _valued(log):
            found[log.parent] = replace(_by_name(log.parent), required="rounds.jsonl has its values")
    if not found:
        raise FedalignError(f"{folder} has no {NAME}: its runs kept no ledger; add [ledger] to the settings")
    return list(found.values())


def _by_settings(folder: Path) -> list[KeptRun]:
    if (folder / "config.toml").is_file():
        return _described(folder, read_settings(folder))
    home = folder.resolve().parent.parent  # a single run of an experiment
    if not (home / "config.toml").is_file():
        return []
    inside = {run.folder: run for run in _described(home, read_settings(home))}
    run = inside.get(folder.resolve())
    return [] if run is None else [replace(run, folder=folder)]


def _described(folder: Path, settings: Mapping[str, Any]) -> list[KeptRun]:
    """List the runs that settings ask a ledger of: those of an experiment, one over Flower, or one of ``simulate``."""
    asked, rounds = "config.toml asks for one", settings.get("rounds")
    try:
        if "arms" in settings:
            finished = (folder / "summary.json").is_file()
            return [
                KeptRun(folder / arm / f"seed-{seed}", arm, seed, settings.get("name"), rounds, asked, finished)
                for arm in settings["arms"]
                if arm_table(settings, arm).get("ledger", "ledger" in settings) and not trains_alone(settings, arm)
                for seed in seed_list(settings["seeds"])
            ]
        if "roster" in settings:
            own = settings.get("arm")
            keeps = own.get("ledger", settings.get("ledger")) if isinstance(own, dict) else settings.get("ledger")
            rule = own["rule"] if isinstance(own, dict) and own else str(own or settings["rule"]).partition("(")[0]
            experiment, seed = settings.get("name") or "flower", settings.get("seed")
            run = KeptRun(folder, rule, seed, experiment, rounds, asked, extensible=True)
            return [run] if keeps else []
        return [KeptRun(folder, None, settings.get("seed"), None, rounds, asked)] if "ledger" in settings else []
    except (AttributeError, KeyError, TypeError) as error:
        raise FedalignError(f"{folder / 'config.toml'} is damaged: {type(error).__name__}: {error}") from error


def _by_name(folder: Path) -> KeptRun:
    """Return what the name of a run's folder says: ``ARM/seed-S``, if it is one of an experiment."""
    seed = folder.name.removeprefix("seed-")
    if folder.name.startswith("seed-") and seed.isdecimal():
        return KeptRun(folder, folder.resolve().parent.name, int(seed))
    return KeptRun(folder)


def _valued(log: Path) -> bool:
    """Tell whether the first round of a log has values of clients."""
    with log.open("rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return False
    return isinstance(first, dict) and "ledger" in first


def _of_another_run(run: KeptRun, chain: Chain) -> Broken | None:
    for name, expected in (("experiment", run.experiment), ("arm", run.arm), ("seed", run.seed)):
        if expected is not None and chain.about[name] != expected:
            return Broken(1, f"is that of another run: its {name} is {chain.about[name]!r:.40}, not {expected!r:.40}")
    return None


def _unlike_rounds(run: KeptRun, chain: Chain) -> Broken | None:
    """Compare a ledger with ``rounds.jsonl``; raises :class:`FedalignError` if that is damaged, or lacks its end."""
    store = RunStore(run.folder)
    if not store.log.exists():
        return None
    records, losses = store.whole_history().rounds, dict[int, float]()
    for record, row in zip(records, chain.rows, strict=False):
        said = {name: row.get(name) for name in ROUND_KEYS} | {"clients": row.get("clients")}
        if said != round_entry(record, losses):
            return Broken(record.round + 2, "has other values than rounds.jsonl")
    if len(records) > len(chain.rows):
        return Broken(len(chain.rows) + 2, f"is missing: rounds.jsonl has {len(records)} rounds")
    under_way = 0 if chain.closed or store.model.exists() else 1  # a run writes its ledger before rounds.jsonl
    if len(chain.rows) > len(records) + under_way:
        return Broken(len(records) + under_way + 2, f"was added: rounds.jsonl has {len(records)} rounds")
    return None


def _closing_line_gone(run: KeptRun, chain: Chain) -> Broken | None:
    ended = RunStore(run.folder).model.exists() and not run.extensible
    if chain.closed or chain.about["ledger"] == 1 or not ended:
        return None
    return Broken(len(chain.rows) + 2, "is missing: the run has ended, and the line that closes the ledger is gone")


def _open_end(run: KeptRun, chain: Chain) -> str:
    """Say why rounds may be missing at the end of a ledger whose lines hold; empty if they cannot."""
    store, rounds = RunStore(run.folder), len(chain.rows)
    if not chain.closed:
        return "its end is not proven, because no line closes it"
    if run.rounds is not None and rounds < run.rounds and store.stopped() is None and store.diverged() is None:
        return f"its end is not proven: it was closed after {rounds} of {run.rounds} rounds"
    return ""
