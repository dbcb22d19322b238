"""FedJAX's federated averaging."""

from __future__ import annotations

from importlib.metadata import version

import jax

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 uses a name that JAX has removed

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from workload import BATCH, CASES, EPOCHS, RATE, Clock, arguments, clients, initial  # noqa: E402

case, rounds = arguments()
_, hidden, classes, _, _ = CASES[case]
data = clients(case)


def forward(batch):
    return hk.nets.MLP([*hidden, classes])(batch["x"])


def loss(batch, outputs):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["y"][:, None], axis=1)[:, 0]


sample = {"x": data[0][0][:1], "y": data[0][1][:1]}
model = fedjax.create_model_from_haiku(hk.transform(forward), sample, loss)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(RATE),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=EPOCHS),
)
federated = fedjax.InMemoryFederatedData({str(k): {"x": x, "y": y} for k, (x, y) in enumerate(data)})
everybody = list(federated.clients())
drawn = model.init(jax.random.PRNGKey(0))
same = {
    name: {"w": jnp.asarray(w), "b": jnp.asarray(b)} for name, (w, b) in zip(sorted(drawn), initial(case), strict=True)
}
state = algorithm.init(same)
clock = Clock()
for r in range(rounds):
    keys = jax.random.split(jax.random.PRNGKey(r), len(everybody))
    state, _ = algorithm.apply(state, [(cid, cds, keys[i]) for i, (cid, cds) in enumerate(everybody)])
    jax.block_until_ready(state.params)
    clock.tick()
right = sum(int((np.asarray(model.apply_for_eval(state.params, {"x": x})).argmax(1) == y).sum()) for x, y in data)
clock.report("FedJAX", f"{version('fedjax')}, jax {jax.__version__}", right / sum(len(y) for _, y in data))
