"""How commands speak beside their output: errors, and notes that must be heard."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from fedalign.errors import FederationWarning


@contextlib.contextmanager
def notes_said() -> Iterator[list[str]]:
    """Collect warnings about federations, and notes, and say each once."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
        yield notes
    for note in dict.fromkeys([*(str(w.message) for w in caught), *notes]):
        errors().print(f"[yellow]note:[/] {escape(note)}")


def errors() -> Console:
    """Speak on the standard error stream: errors, and notes that must be heard also with --quiet."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
