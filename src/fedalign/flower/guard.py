"""Runs an app for one message, as ``flwr-clientapp`` does, with the config that the node's owner gave.

An app returns its context to the SuperNode with every reply, and could change the node's config in it. So the config
comes from the owner's command line each time. If the owner set limits and did not say which apps to trust, FedALIGN's
own ClientApp runs in place of the app's, because only that one is known to keep them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedalign.flower.policy import Policy
from fedalign.flower.polling import quicken_pulls

CONFIG = "node-config.json"  #: in the node's folder
PULL, LOAD = "pull_task_input", "get_load_client_app_fn"  #: the functions of Flower that are replaced


def run_app(folder: Path, words: Sequence[str]) -> NoReturn:
    """Run the app with the command line of ``flwr-clientapp``, and end this process without further cleanup.

    ``folder`` is the node's own: it has the config, and apps are unpacked there.
    """
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    policy = Policy.read(config)
    # Flower does not unpack an app if there is a folder named by a part of its hash, so nobody else may put one there.
    os.environ["FLWR_HOME"] = str(folder / "flwr")
    given = {key: value for key, value in config.items() if key != "apps"}  # which the gate has checked
    quicken_pulls()
    setattr(runtime, PULL, with_config(getattr(runtime, PULL), given))
    if policy.limits_an_app and not policy.allowed_apps:
        setattr(runtime, LOAD, _own_app)
    sys.argv = ["flwr-clientapp", *words]
    code = 0
    try:
        flwr_clientapp()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


Pulled = tuple[Message, Context, Any, Any]


def with_config(pull: Callable[[Any], Pulled], config: Mapping[str, Any]) -> Callable[[Any], Pulled]:
    """Wrap the function that fetches a message and its context, so that the context has the owner's config."""

    def pull_with_config(client: Any) -> Pulled:
        message, context, run, bundle = pull(client)
        context.node_config = dict(config)
        return message, context, run, bundle

    return pull_with_config


def _own_app(**_: object) -> Callable[[str, str, str], ClientApp]:
    """Stand in for Flower's function that finds out how to load the app's own ClientApp."""
    from flwr.common.config import get_project_dir

    from fedalign.flower.client_app import app

    def load(name: str, version: str, digest: str) -> ClientApp:
        sys.path.insert(0, str(get_project_dir(name, version, digest)))  # with the functions for model and data
        return app

    return load


if __name__ == "__main__":
    run_app(Path(sys.argv[1]), sys.argv[2:])
