"""The plain per-client PyTorch loop that everybody writes first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_models import accuracy, make
from workload import BATCH, EPOCHS, RATE, Clock, arguments, clients

case, rounds = arguments()
data = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in clients(case)]
model = make(case)
clock = Clock()
for _ in range(rounds):
    start = {k: v.clone() for k, v in model.state_dict().items()}
    total = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in start.items()}
    for x, y in data:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(EPOCHS):
            order = torch.randperm(len(y))
            for batch in order.split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        for k, v in model.state_dict().items():
            total[k] += v / len(data)
    model.load_state_dict({k: v.to(start[k].dtype) for k, v in total.items()})
    clock.tick()
clock.report("plain PyTorch loop", torch.__version__, accuracy(model, data))
