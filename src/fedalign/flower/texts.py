"""Makes the texts that nodes send safe for a terminal, a log and a record."""

from __future__ import annotations

import unicodedata

_LONGEST = 200
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, invisible, broken and unassigned characters


def plain_text(text: object, longest: int = _LONGEST) -> str:
    r"""Return a stranger's text in one line of at most ``longest`` characters, without control characters.

    What a terminal or an editor would obey (escape sequences, line breaks, marks that reverse the direction of a
    text) becomes ``?``. A text that is cut ends with ``…``. What is not a text becomes the name of its type.

    >>> plain_text("loss 2.1 is high\x1b[2J\nERROR forged line")
    'loss 2.1 is high?[2J?ERROR forged line'
    >>> plain_text("x" * 1000, longest=5)
    'xxxx…'
    >>> plain_text(b"bytes")
    'a bytes'
    """
    if type(text) is not str:
        return f"a {plain_text(type(text).__name__)}"
    start = text.strip()[: longest + 1]
    seen = "".join("?" if unicodedata.category(c) in _UNSEEN else c for c in start)
    return seen if len(seen) <= longest else f"{seen[: longest - 1]}…"
