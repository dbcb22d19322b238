"""The text notation of settings: a name, or a name with options, ``"trimmed-mean(trim=0.2)"``."""

from __future__ import annotations

import ast
import math
import re
import tomllib
from typing import Any

from fedalign.errors import FedalignError

_NOTATION = re.compile(r"\s*([^()\s]+)\s*(?:\((.*)\)\s*)?", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``"name(option=value, …)"`` into the name and the options; values are numbers, texts, lists, true or false.

    >>> parse("trimmed-mean(trim=0.2)")
    ('trimmed-mean', {'trim': 0.2})
    >>> parse("median")
    ('median', {})
    """
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise FedalignError(f"{text!r} is neither a name nor name(option=value)")
    name, inside = found.groups()
    try:
        call = ast.parse(f"_({inside or ''})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("options need names")
        options = {keyword.arg: _literal(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        if len(options) < len(call.keywords):
            raise ValueError("options need names, each once")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise FedalignError(f"cannot read the options of {text!r}; write them as {name}(option=value, …)") from error
    return name, options


def read_value(text: str) -> Any:
    """Read a value as TOML does, or else as text: so text needs no quotes in the shell.

    >>> read_value("0.05"), read_value("[1, 2]"), read_value("loss")
    (0.05, [1, 2], 'loss')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def split_values(text: str) -> list[str]:
    """Split a text at commas that are not inside brackets or quotes.

    Raises :class:`FedalignError` for an empty part, and for brackets or quotes that are not closed.

    >>> split_values("[100],[200, 200]"), split_values("fedalign(epsilon=1, match='loss'),all")
    (['[100]', '[200, 200]'], ["fedalign(epsilon=1, match='loss')", 'all'])
    """
    parts, open_brackets, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            open_brackets += (letter in "([{") - (letter in ")]}")
        if letter == "," and not open_brackets and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if open_brackets or quote:
        raise FedalignError(f"{text!r} has brackets or quotes that are not closed")
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise FedalignError(f"{text!r} has an empty value; write values as 0.1,0.2 and a text with commas in quotes")
    return parts


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name):
        return -_literal(node.operand)
    return ast.literal_eval(node)
