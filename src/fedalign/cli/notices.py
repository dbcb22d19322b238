"""Messages on the standard error stream: errors, and notes that appear even with --quiet."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedalign.errors import FederationWarning


@contextlib.contextmanager
def printed_notes() -> Iterator[list[str]]:
    """Collect warnings about federations and print each once, followed by the notes that the caller appends."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
        yield notes
    for note in dict.fromkeys([*(str(w.message) for w in caught), *notes]):
        error_console().print(f"[yellow]note:[/] {escape(note)}")


@contextlib.contextmanager
def notes_at_once() -> Iterator[None]:
    """Print warnings about a run as they come, each once, so that a long run does not keep them to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", FederationWarning)
        usual, said = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, FederationWarning):
                usual(message, category, *place, **more)
            elif str(message) not in said:
                said.add(str(message))
                error_console().print(f"[yellow]note:[/] {escape(str(message))}")

        warnings.showwarning = show  # catch_warnings restores it
        yield


def error_console() -> Console:
    """Return a console for the standard error stream, which --quiet does not silence."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
