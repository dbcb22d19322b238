"""What a node's owner said on the command line of ``fedalign flower node``: the node's config, and its policy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from fedalign.errors import FedalignError

_PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")  # as Flower reads them; it ignores everything else


class _Options(argparse.Namespace):
    """Takes ``--node-config`` once: of two, argparse would keep the last, and the limits in the first were lost."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "node_config" and getattr(self, name, None) is not None:
            raise FedalignError("--node-config is given twice; write all keys in one, with spaces between them")
        super().__setattr__(name, value)


def node_config(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Read the node's config from the options of ``flower-supernode``, with Flower's own parser.

    Raises :class:`FedalignError` for a config that Flower would ignore a part of, for two, and for the isolation mode
    ``process``, in which other processes run the apps. Ends the process as Flower does for options that are wrong.

    >>> dict(node_config(["--insecure", "--node-config", "partition-id=1 opt-out=true"]))
    {'partition-id': 1, 'opt-out': True}
    >>> node_config(["--node-config", "opt-out partition-id=1"])
    Traceback (most recent call last):
    fedalign.errors.FedalignError: cannot read 'opt-out' in --node-config: write KEY=VALUE, as in opt-out=true
    """
    from flwr.common.config import parse_config_args
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    options = _parse_args_run_supernode().parse_args(list(arguments), _Options())
    if options.isolation == "process":
        raise FedalignError("fedalign flower node runs the apps itself, so that limits hold: leave out --isolation")
    text = options.node_config or ""
    if not text.endswith(".toml") and (rest := _PAIR.sub(" ", text).split()):
        raise FedalignError(f"cannot read {rest[0]!r} in --node-config: write KEY=VALUE, as in opt-out=true")
    try:
        return parse_config_args([text] if text else None)
    except (click.ClickException, OSError, ValueError) as error:
        raise FedalignError(f"cannot read the --node-config {text!r}: {error}") from error
