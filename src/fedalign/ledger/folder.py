"""The ledgers of an output folder: of every arm and seed of an experiment, or of a run over Flower."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from fedalign.errors import FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.ledger.account import Account, accounts
from fedalign.ledger.chain import NAME, Chain, read_chain

Place = tuple[str, str]  #: arm and seed
Ledgers = dict[Place, tuple[Path, Chain]]


def read_ledgers(folder: Path, key: str | None = None) -> Ledgers:
    """Read and check all ledgers in a folder; raises :class:`FedalignError` if there is none."""
    paths = ledger_files(folder)
    if not paths:
        raise FedalignError(f"{folder} has no {NAME}: its runs kept no ledger; add [ledger] to the settings")
    found: Ledgers = {}
    for path in paths:
        chain, inside = read_chain(path, key), path.parent != folder
        arm = path.parent.parent.name if inside else str(chain.about.get("arm", ""))
        found[arm, path.parent.name.removeprefix("seed-") if inside else str(chain.about.get("seed", ""))] = path, chain
    return found


def ledger_files(folder: Path) -> list[Path]:
    """List the ledgers in a folder: its own, or those of an experiment's runs."""
    found = [folder / NAME] if (folder / NAME).is_file() else sorted(folder.glob(f"*/seed-*/{NAME}"))
    return [path for path in found if path.is_file()]


def all_accounts(ledgers: Ledgers) -> dict[Place, Mapping[int, Account]]:
    """Add up every ledger, as far as its lines hold."""
    return {place: accounts(chain.rows) for place, (_, chain) in ledgers.items()}


def write_csv(path: Path, found: Mapping[Place, Mapping[int, Account]]) -> None:
    """Write a row for every arm, seed and client."""
    rows = [{"arm": arm, "seed": seed, **one.as_json()} for (arm, seed), own in found.items() for one in own.values()]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["arm", "seed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
