"""``simulate``: a federation, a model and a rule in; a trained model and its history out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fedalign.aggregation.aggregator import Aggregator, WeightedMean
from fedalign.aggregation.update_steps import ClientStep, ServerStep
from fedalign.callbacks import Callback
from fedalign.data.federation import Federation
from fedalign.protocol.messages import RoundDone
from fedalign.rules.align import Align
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Rule
from fedalign.simulation.simulation import EngineName, Simulation, SimulationResult
from fedalign.simulation.spec import ModelFactory, RunSpec
from fedalign.training.local import LocalSGD
from fedalign.training.losses import PerSampleLoss, cross_entropy
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Full, Participation
from fedalign.training.server import ServerOptimizer


def simulate(
    federation: Federation,
    model: ModelFactory | nn.Module,
    rule: Rule | Alone | None = None,
    rounds: int = 200,
    warmup: float = 0.1,
    local: LocalOptimizer | None = None,
    participation: Participation | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    loss: PerSampleLoss = cross_entropy,
    engine: EngineName = "batched",
    chunk: int | None = None,
    tf32: bool = False,
    server: ServerOptimizer | None = None,
    aggregator: Aggregator | None = None,
    client_steps: Sequence[ClientStep] = (),
    server_steps: Sequence[ServerStep] = (),
    callbacks: Sequence[Callback] = (),
    on_round: Callable[[RoundDone], None] | None = None,
) -> SimulationResult:
    """Simulate one prioritized federation.

    ``model`` is a function that makes a module (initialised by ``seed``), or a module whose weights are the start.
    ``rule`` is FedALIGN with ε = 0.2 unless given. ``warmup`` is a fraction of the rounds (below 1) or a number of
    them. ``loss`` gives one number per sample. ``tf32`` lets a GPU round the factors of products to 10 bits, which is
    faster; else they are float32. ``server`` is an optimiser such as :class:`FedAdam`; without one the aggregate is
    taken as it is. ``aggregator`` is the weighted mean unless given. Every seam takes an object of your own class.
    Raises :class:`DivergedError` if training leaves the finite numbers.

    >>> import torch
    >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
    >>> fed = Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> result = simulate(fed, lambda: nn.Linear(4, 2), rounds=3, local=LocalSGD(lr=0.1, epochs=1))
    >>> len(result.history), result.model
    (3, Linear(in_features=4, out_features=2, bias=True))
    """
    spec = RunSpec(
        federation,
        rule if rule is not None else Align(),
        rounds,
        warmup,
        local if local is not None else LocalSGD(lr=0.1, epochs=5),
        participation if participation is not None else Full(),
        seed,
        server=server,
        aggregator=aggregator if aggregator is not None else WeightedMean(),
        client_steps=client_steps,
        server_steps=server_steps,
        callbacks=callbacks,
    )

    def relay(index: int, done: RoundDone) -> None:
        if on_round is not None:
            on_round(done)

    (result,) = simulate_many(
        [spec], model, loss=loss, device=device, engine=engine, chunk=chunk, tf32=tf32, on_round=relay
    )
    if result.error is not None:
        result.error.history = result.history
        raise result.error
    return result


def simulate_many(
    specs: Sequence[RunSpec],
    model: ModelFactory | nn.Module,
    *,
    loss: PerSampleLoss = cross_entropy,
    device: str = "auto",
    engine: EngineName = "batched",
    chunk: int | None = None,
    tf32: bool = False,
    on_round: Callable[[int, RoundDone], None] = lambda index, done: None,
) -> list[SimulationResult]:
    """Simulate several runs of one model together: they advance round by round and share batches.

    A run that diverges ends with ``error`` set; the others go on.
    """
    return Simulation(specs, model, loss=loss, device=device, engine=engine, chunk=chunk, tf32=tf32).run(on_round)
