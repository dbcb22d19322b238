"""Downloads the files of a data set with pooch: progress, checksums, mirrors, and resuming a broken download."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedalign.data.source import Remote, Source
from fedalign.errors import FedalignError

_CHUNK = 1 << 14  # bytes
_TIMEOUT = 20  # seconds


def get(source: Source, console: Console) -> list[Path]:
    """Download the missing files of a data set, verify their checksums, and return the paths of all its files.

    Raises :class:`FedalignError` if no mirror has a file, or if the files cannot be written.
    """
    folder = source.place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedalignError(
            f"cannot create the folder {folder}: {error.strerror}; set FEDALIGN_DATA to another one"
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

    pooch.get_logger().setLevel("WARNING")  # the progress bar shows what it would log
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
            failures.append(f"{url} (its checksum is wrong: {error.__class__.__name__})")
        except OSError as error:
            with contextlib.suppress(OSError):
                _part(target).unlink(missing_ok=True)
            raise FedalignError(
                f"cannot write {target}: {error.strerror or error}; free some space, or set "
                "FEDALIGN_DATA to another folder"
            ) from error
    raise FedalignError(
        f"could not download {remote.name} of {source.title} from {' or '.join(failures)}; run the same command again "
        f"to resume, or put the file (md5 {remote.md5}) into {folder} yourself"
    )


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


class _Resuming:
    """A downloader for pooch that keeps partial content in ``NAME.part`` and requests only the rest."""

    def __init__(self, target: Path, bar: Progress) -> None:
        self._target, self._bar = target, bar

    def __call__(self, url: str, output_file: str | IO[bytes], pooch: Any, check_only: bool = False) -> None:
        import requests

        part = _part(self._target)
        have = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        task = self._bar.add_task(self._target.name, total=None, completed=have)
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as answer:
            if answer.status_code == requests.codes.requested_range_not_satisfiable:
                whole = have  # the partial file is complete
            else:
                answer.raise_for_status()
                if answer.status_code != requests.codes.partial_content:
                    have = 0  # the server sends the whole file
                whole = have + int(answer.headers.get("Content-Length", 0))
                self._bar.update(task, total=whole or None, completed=have)
                with part.open("ab" if have else "wb") as file:
                    for piece in answer.iter_content(_CHUNK):
                        file.write(piece)
                        self._bar.advance(task, len(piece))
                if whole and part.stat().st_size < whole:
                    raise requests.ConnectionError("the connection was lost")
        if isinstance(output_file, str | Path):
            part.replace(output_file)
        else:
            output_file.write(part.read_bytes())
            part.unlink()
