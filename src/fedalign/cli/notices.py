"""Messages on the standard error stream: errors, and notes that appear even with --quiet."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

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


def error_console() -> Console:
    """Return a console for the standard error stream, which --quiet does not silence."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
