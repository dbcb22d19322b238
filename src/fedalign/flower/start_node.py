"""``fedalign flower node``: a SuperNode that keeps its owner's policy, and whose ClientApp processes start warm.

It is made of a supervisor (``supervise.py``), the SuperNode with the gate (``supernode.py``, ``gate.py``), the warm
process (``warm.py``), and a script named like Flower's command for apps, first on PATH (``hand_over.py``).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedalign.errors import FedalignError
from fedalign.flower import hand_over, supervise
from fedalign.flower.node_config import node_config
from fedalign.flower.policy import Policy
from fedalign.flower.polling import IDLE, shortest_pause


def node(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a supervisor that runs a node with these options of ``flower-supernode``.

    Raises :class:`FedalignError`, before anything starts, if Flower is not installed, or for a policy, a config or an
    environment that is wrong.
    """
    commands = Path(sys.executable).parent  # of this environment, whether it is activated or not
    if not (commands / "flower-supernode").exists():
        raise FedalignError(f"there is no flower-supernode in {commands}: pip install 'fedalign[flower]'")
    shortest_pause(os.environ.get(IDLE))
    config = node_config(arguments)
    policy = Policy.read(config)
    in_force = ", ".join(policy.limits)
    print(f"fedalign: limits in force: {in_force}" if in_force else "fedalign: no limits", file=sys.stderr, flush=True)
    if policy.limits_an_app and not policy.allowed_apps:
        print(
            "fedalign: limits are set, but no apps: FedALIGN's own ClientApp runs in place of any app's; an app's "
            'functions for model and data still run; apps="SHA-256" names the apps to trust (fedalign flower hash)',
            file=sys.stderr,
            flush=True,
        )
    folder = Path(tempfile.mkdtemp(prefix="fedalign-node-"))  # for its owner alone: messages have a secret token
    script, kept = (folder / name for name in supervise.NEEDED)
    kept.write_text(json.dumps(dict(config)), encoding="utf-8")
    words = shlex.join([sys.executable, "-IS", str(hand_over.__file__), sys.executable, str(folder)])
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o700)
    os.environ["PATH"] = os.pathsep.join([str(folder), str(commands), os.environ.get("PATH", os.defpath)])
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # Flower's default is a second per message
    started = [sys.executable, "-IS", str(supervise.__file__), sys.executable, str(folder), *arguments]
    os.execv(sys.executable, started)
