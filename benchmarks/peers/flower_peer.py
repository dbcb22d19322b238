"""Flower's simulation engine (Ray), one client app per supernode."""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import flwr
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch_models import accuracy, make
from workload import BATCH, CASES, EPOCHS, RATE, Clock, arguments, clients

case, rounds = arguments()
count = CASES[case][3]
client_app, server_app = ClientApp(), ServerApp()
_cache: dict[str, object] = {}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    if "data" not in _cache:  # once in every worker process
        torch.set_num_threads(1)
        _cache["data"] = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in clients(case)]
        _cache["model"] = make(case)
    x, y = _cache["data"][int(context.node_config["partition-id"])]
    model = _cache["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        clock.tick()
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    global clock
    model = make(case)
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    clock = Clock()
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    clock.report("Flower simulation", flwr.__version__, accuracy(model, clients(case)))


if __name__ == "__main__":
    flwr.simulation.run_simulation(
        server_app, client_app, num_supernodes=count,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": os.cpu_count()}},
    )  # fmt: skip
