"""FedALIGN: `simulate` with everybody admitted, which is FedAvg on all."""

from __future__ import annotations

import torch_models
from workload import BATCH, EPOCHS, RATE, Clock, arguments, clients

import fedalign as fa

case, rounds = arguments()
data = clients(case)
held = [(x[:10], y[:10]) for x, y in data]  # the peers measure nothing while they train; we always measure a little
fed = fa.Federation.from_arrays(data, heldout=held, priority=[k == 0 for k in range(len(data))])
model = torch_models.make(case)
clock = Clock()
result = fa.simulate(
    fed, model, fa.Everyone(), rounds, 0, fa.LocalSGD(RATE, epochs=EPOCHS, batch_size=BATCH), device="cpu",
    on_round=lambda done: clock.tick(),
)  # fmt: skip
clock.report("FedALIGN", fa.__version__, torch_models.accuracy(result.model, data))
