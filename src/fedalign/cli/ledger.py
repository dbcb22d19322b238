"""``fedalign ledger``: what every client gave and got, as a table, a picture and a CSV file; ``verify`` checks it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.cli.notices import error_console
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.ledger.chain import Chain
    from fedalign.ledger.folder import Ledgers

CHANGED = 1  #: the exit code for a ledger that does not hold
_STYLES = {"holds": "green", "unfinished": "yellow", "changed": "bold red"}
_HEADINGS = ("client", "role", "gave", "± (95 %)", "got", "used", "refused", "why")


def add(commands: Subcommands) -> None:
    """Add ``ledger`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("ledger", help="show what every client gave and got, or verify that no line changed")
    command.add_argument(
        "words", nargs="+", metavar="[verify] DIR", help="a run's output folder; after verify, check its ledgers alone"
    )
    command.add_argument("--arm", metavar="NAME", help="this arm only")
    command.add_argument(
        "--key", type=Path, metavar="FILE", help="the public key or the certificate that must have signed the ledger"
    )
    command.add_argument(
        "--account", type=Path, metavar="FILE", help="verify: an account that a server sent, or the log of a node"
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="where the picture and the CSV file go (default: DIR)")
    command.set_defaults(command=_ledger)


def _ledger(options: argparse.Namespace) -> int:
    from fedalign.ledger.folder import read_ledgers

    verify = len(options.words) == 2 and options.words[0] == "verify"
    if len(options.words) != 1 and not verify:
        raise FedalignError(f"give one folder, or verify and one folder, not {' '.join(options.words)!r}")
    folder = Path(options.words[-1])
    try:
        key = None if options.key is None else options.key.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedalignError(f"cannot read the key {options.key}: {error}") from error
    if verify:
        return _verify(folder, key, options.arm, options.account)
    if options.account is not None:
        raise FedalignError(f"--account goes with verify: fedalign ledger verify {folder} --account {options.account}")
    found = {place: one for place, one in read_ledgers(folder, key).items() if options.arm in (None, place[0])}
    if not found:
        raise _no_ledger(folder, options.arm)
    return _show(found, options.out or folder)


def _no_ledger(folder: Path, arm: str | None) -> FedalignError:
    return FedalignError(f"{folder} has no ledger of an arm {arm!r}")


def _verify(folder: Path, key: str | None, arm: str | None, account: Path | None) -> int:
    from fedalign.ledger.receipt import accounts_in
    from fedalign.ledger.signing import load_public
    from fedalign.ledger.verification import verify_folder

    if key is not None:
        load_public(key)  # a file that is no key is an error, not a change of a ledger
    own = [] if account is None else accounts_in(account)
    console, verdicts = Console(highlight=False), verify_folder(folder, key, arm)
    if not verdicts:
        raise _no_ledger(folder, arm)
    for one in verdicts:
        style, words = _STYLES[one.state], [one.why] if one.why else []
        if one.chain is not None and one.state != "changed":
            signed = f"signed by the key {one.chain.signed_by}" if one.chain.signed_by else "not signed"
            words = [f"{len(one.chain.rows)} rounds, {signed}, last hash {one.chain.last}", *words]
        said = escape(f"{one.path}: {'; '.join(words)}")
        console.print(f"[{style}]{one.state}:[/] {said}", soft_wrap=True)
    chains = [one.chain for one in verdicts if one.chain is not None]
    agrees = account is None or _agrees(console, account, own, chains)
    changed = not agrees or any(one.state == "changed" for one in verdicts)
    if not changed and any(one.chain is not None and one.chain.signed_by is None for one in verdicts):
        console.print("Whoever can write a ledger without signatures can also write it anew. See ledger.key.")
    return CHANGED if changed else 0


def _agrees(console: Console, path: Path, own: Sequence[Mapping[str, Any]], chains: Sequence[Chain]) -> bool:
    """Say whether the account in a file agrees with a ledger of the folder."""
    from fedalign.ledger.receipt import account_of_ledger, compare_account

    row = account_of_ledger(own, chains)
    differences = [compare_account(row, chain) for chain in chains]
    if None in differences:
        said = f"{path}: the account of {row['client']} with the hash {row['previous']}"
        console.print(f"[green]agrees:[/] {escape(said)}", soft_wrap=True)
        return True
    why = differences[0] if differences else "is missing"
    console.print(f"[bold red]changed:[/] {escape(f'the ledger {why}, which is in {path}')}", soft_wrap=True)
    return False


def _show(ledgers: Ledgers, out: Path) -> int:
    from fedalign.ledger.account import mean_accounts
    from fedalign.ledger.folder import all_accounts, write_csv
    from fedalign.report import plot_style
    from fedalign.report.ledger_plot import contributions

    console, found = Console(highlight=False), all_accounts(ledgers)
    for path, chain in ledgers.values():
        if chain.broken is not None:
            error_console().print(
                f"[bold yellow]fedalign:[/] {escape(str(path))}: {escape(str(chain.broken))}; shown as far as it holds",
                soft_wrap=True,
            )
    pictures: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for arm in dict.fromkeys(arm for arm, _ in found):
            rows = mean_accounts([own for (name, _), own in found.items() if name == arm])
            seeds = sum(name == arm for name, _ in found)
            console.print(_table(f"{arm} ({seeds} {'seed' if seeds == 1 else 'seeds, means'})", rows))
            if not rows:
                continue
            rounds = next(chain.rows for (name, _), (_, chain) in ledgers.items() if name == arm)
            pictures += plot_style.save(contributions(arm, rows, rounds), out / f"ledger-{arm}")
        write_csv(out / "ledger.csv", found)
    except OSError as error:
        raise FedalignError(f"cannot write to {out}: {error.strerror}") from error
    console.print("gave: fall of the priority clients' loss due to its updates; got: fall of its own loss, by its word")
    for path in [out / "ledger.csv", *(one for one in pictures if one.suffix == ".png")]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=escape(title), title_justify="left", title_style="bold")
    for heading in _HEADINGS:
        right = heading not in ("client", "role", "why")
        table.add_column(heading, overflow="fold", justify="right" if right else "left", no_wrap=heading != "why")
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    why = _cut(row["reason"], 60) or (f"a copy in {row['copies']:g} rounds" if row["copies"] else "")
    return [
        _cut(row["client"], 20),
        "priority" if row["priority"] else "free",
        f"{row['gave']:+.3g}",
        f"{(row['high'] - row['low']) / 2:.2g}",
        "" if row["got"] is None else f"{row['got']:+.3g}",
        f"{row['used']:g} of {row['rounds']:g}",
        f"{row['refused']:g}",
        why,
    ]


def _cut(text: str, most: int) -> str:
    """Cut a long text; the CSV file has all of it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
