"""The callback that writes ``ledger.jsonl``: a line for every round, with what each client gave and got."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedalign.callbacks import Callback, RunInfo
from fedalign.errors import FedalignError
from fedalign.experiments.durable_files import sync_folder
from fedalign.ledger.chain import NAME, START, Chain, closing_line, read_chain, write_line
from fedalign.ledger.entries import falls, round_entry
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.signing import Signer
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import RoundRecord

FORMAT = 2  #: of the file; version 1 had no closing line


class LedgerWriter(Callback):
    """Writes the ledger of a run into its folder. A run that is resumed continues the chain where it goes on.

    The end of the run, or its divergence, closes the ledger; a run that is extended opens it again.

    ``signer`` signs the lines; without one, that of the ledger's key does, if it has one.
    """

    needs_model = False

    def __init__(self, ledger: Ledger, signer: Signer | None = None) -> None:
        self._ledger, self._signer = ledger, signer
        self._path, self._last, self._rounds = Path(), START, 0
        self._losses: dict[int, float] = {}  # the last loss of every client, of the model that it received

    def check(self, run: RunInfo) -> None:
        """Refuse a key that cannot be read, and a ledger that cannot be continued."""
        self._sign_with()
        if run.folder is not None and run.start:
            self._kept(run.folder / NAME, run.start)

    def on_start(self, run: RunInfo) -> None:
        """Begin the file, or cut it back to the round that the run goes on from."""
        if run.folder is None:
            raise FedalignError("a ledger needs the folder of a run: out='…'")
        signer = self._sign_with()
        self._path = run.folder / NAME
        if run.start:
            texts = self._kept(self._path, run.start).texts[: run.start + 1]
        else:
            about = {
                "ledger": FORMAT,
                "experiment": run.experiment,
                "arm": run.arm,
                "seed": run.seed,
                "method": self._ledger.method_name,
                "copies": self._ledger.copies,
                "calibrated": self._ledger.calibrated,
                "priority": self._ledger.priority,
                "key": "" if signer is None else signer.public,
            }
            texts = (write_line(about, START, signer),)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{NAME}.new")
        with fresh.open("wb") as file:
            file.writelines(text + b"\n" for text in texts)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        sync_folder(self._path.parent)
        self._last, self._rounds = Chain({}, texts=texts).last, run.start
        self._losses = {}
        for record in run.past:
            falls(record, self._losses)

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Write a finished round. It is on disk before a checkpoint of the round is."""
        if record.ledger is None:
            raise FedalignError("this rule's algorithm values no clients: leave [ledger] out, or set ledger = false")
        row = round_entry(record, self._losses)
        line = write_line(row, self._last, self._sign_with())
        self._append(line)
        self._last, self._rounds = Chain({}, texts=(line,)).last, self._rounds + 1

    def on_end(self, result: Any) -> None:
        """Write the closing line, which says that no round is missing."""
        self._append(closing_line(self._rounds, self._last, self._sign_with()))

    def _append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _sign_with(self) -> Signer | None:
        if self._signer is None and self._ledger.key is not None:
            self._signer = Signer.read(self._ledger.key)
        return self._signer

    def _kept(self, path: Path, rounds: int) -> Chain:
        """Read the ledger of a run to continue; raises :class:`FedalignError` if it has not all its rounds."""
        chain, signer = read_chain(path), self._sign_with()
        if len(chain.rows) < rounds:
            why = chain.broken or f"has {len(chain.rows)} rounds"
            raise FedalignError(f"cannot continue {path}, because it {why}, and the run goes on from round {rounds}")
        if chain.about.get("key", "") != ("" if signer is None else signer.public):
            raise FedalignError(f"cannot continue {path} with another key: the first line has the one that signs it")
        return chain
