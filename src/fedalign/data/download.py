"""Downloads a data set's files with pooch: progress, checksums, mirrors, and going on where a download broke off."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedalign.data.sources import Remote, Source
from fedalign.errors import FedalignError

_PIECE = 1 << 14
_SECONDS = 20  # to wait for a server


def get(source: Source, console: Console) -> list[Path]:
    """Download what is missing of a data set and verify it; give the files. What is there already is left alone."""
    folder = source.place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedalignError(
            f"cannot make the folder {folder}: {error.strerror}; FEDALIGN_DATA names another"
        ) from error
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        return [_get_one(remote, source, folder, bar) for remote in source.remotes]


def _get_one(remote: Remote, source: Source, folder: Path, bar: Progress) -> Path:
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")  # the bar tells what it would
    target = folder / remote.name
    failures = []
    for url in remote.urls:
        try:
            found = pooch.retrieve(
                url, f"md5:{remote.md5}", fname=remote.name, path=folder, downloader=_Resuming(target, bar)
            )
            return Path(found)
        except requests.RequestException as error:
            failures.append(f"{url} ({type(error).__name__})")
        except ValueError as error:  # pooch: the checksum is wrong
            _part(target).unlink(missing_ok=True)
            failures.append(f"{url} (its content is not what it should be: {error.__class__.__name__})")
        except OSError as error:
            with contextlib.suppress(OSError):
                _part(target).unlink(missing_ok=True)
            raise FedalignError(
                f"cannot write {target}: {error.strerror or error}; free some space, or name another folder in "
                "FEDALIGN_DATA"
            ) from error
    raise FedalignError(
        f"could not get {remote.name} of {source.title} from {' or '.join(failures)}. Offline, put the file "
        f"(md5 {remote.md5}) into {folder} yourself; a broken download goes on with the same command"
    )


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


class _Resuming:
    """A downloader for pooch that keeps what it has got in ``NAME.part`` and asks the server for the rest."""

    def __init__(self, target: Path, bar: Progress) -> None:
        self._target, self._bar = target, bar

    def __call__(self, url: str, output_file: str | IO[bytes], pooch: Any, check_only: bool = False) -> None:
        import requests

        part = _part(self._target)
        have = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        task = self._bar.add_task(self._target.name, total=None, completed=have)
        with requests.get(url, headers=headers, stream=True, timeout=_SECONDS) as answer:
            if answer.status_code == requests.codes.requested_range_not_satisfiable:
                whole = have  # everything is there already
            else:
                answer.raise_for_status()
                if answer.status_code != requests.codes.partial_content:
                    have = 0  # the server starts again
                whole = have + int(answer.headers.get("Content-Length", 0))
                self._bar.update(task, total=whole or None, completed=have)
                with part.open("ab" if have else "wb") as file:
                    for piece in answer.iter_content(_PIECE):
                        file.write(piece)
                        self._bar.advance(task, len(piece))
                if whole and part.stat().st_size < whole:
                    raise requests.ConnectionError("the connection broke off")
        if isinstance(output_file, str | Path):
            part.replace(output_file)
        else:
            output_file.write(part.read_bytes())
            part.unlink()
