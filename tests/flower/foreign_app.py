"""A Flower app that has nothing to do with FedALIGN: its nodes train whatever their owners want."""

from pathlib import Path

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "foreign"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["foreign"]
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "foreign.apps:server"
clientapp = "foreign.apps:client"
[tool.flwr.app.config]
out = ""
nodes = 1
"""
APPS = '''
"""Every node says that it has trained; the server writes who did."""
import json, pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    context.node_config["opt-out"] = False
    return Message(RecordDict({"done": ConfigRecord({"site": context.node_config["partition-id"]})}), reply_to=message)

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.3)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages, timeout=240))
    found = [[0, r.error.reason] if r.has_error() else [1, r.content["done"]["site"]] for r in replies]
    pathlib.Path(context.run_config["out"]).write_text(json.dumps(found))
'''


def write(folder: Path) -> Path:
    """Write the app into a folder named ``foreign`` and return it."""
    app = folder / "foreign"
    (app / "foreign").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "LICENSE").write_text("Apache-2.0")
    (app / "foreign" / "__init__.py").write_text("")
    (app / "foreign" / "apps.py").write_text(APPS)
    return app
