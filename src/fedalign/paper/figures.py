"""The figures of the paper (Ravi and Shomorony, 2023), their experiments, and the claims that the paper makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a claim compares. "above both": the final accuracy of FedALIGN with both baselines; "faster": the rounds that
#: FedALIGN and `priority` need; "all below": `all` with `priority`; "better off": the shared and the local model of a
#: free client.
Comparison = Literal["above both", "faster", "all below", "better off"]


@dataclass(frozen=True)
class Claim:
    """A claim that the paper makes about some of its experiments."""

    text: str
    comparison: Comparison
    experiments: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: the experiments of its panels, the arms and curves that it shows, and its claims."""

    number: int
    title: str
    experiments: tuple[str, ...]
    claims: tuple[Claim, ...]
    arms: tuple[str, ...] = ("priority", "all", "fedalign", "fedalign-train")
    curves: tuple[str, ...] = ("test_accuracy",)


_BENCHMARK = ("fmnist", "emnist", "cifar10")
_SYNTH = ("synth-medium", "synth-low", "synth-high")
_LOCAL = ("local-fmnist", "local-emnist", "local-cifar10")
_PROX = ("prox-fmnist", "prox-emnist")
_PARTIAL = ("partial-fmnist", "partial-emnist", "partial-cifar10")
_VARIOUS = ("various-fmnist-6", "various-emnist-9", "various-emnist-18")

FIGURES: dict[int, Figure] = {
    figure.number: figure
    for figure in (
        Figure(
            1,
            "Benchmark data, 2 priority clients of 60",
            _BENCHMARK,
            (
                Claim("FedALIGN reaches a higher final accuracy than both baselines", "above both", _BENCHMARK),
                Claim("FedALIGN accelerates convergence after the warm-up", "faster", _BENCHMARK),
                Claim("Including all clients deteriorates the accuracy", "all below", _BENCHMARK),
            ),
        ),
        Figure(
            2,
            "Synth(1,1) with medium, low and high noise, 10 priority clients of 20",
            _SYNTH,
            (
                Claim("FedALIGN consistently outperforms the baselines at every noise level", "above both", _SYNTH),
                Claim("Including all clients deteriorates the accuracy", "all below", _SYNTH),
            ),
            arms=("priority", "all", "fedalign"),
            curves=("train_loss", "test_accuracy"),
        ),
        Figure(
            3,
            "50 samples a client: free clients with the shared model and with their own",
            _LOCAL,
            (Claim("FedALIGN's model serves non-priority clients better than their own models", "better off", _LOCAL),),
            arms=("priority", "all", "local", "fedalign", "fedalign-train"),
        ),
        Figure(
            4,
            "FedProx with μ = 1, 4 priority clients of 60",
            _PROX,
            (Claim("FedALIGN on FedProx is clearly superior to both baselines", "above both", _PROX),),
        ),
        Figure(
            5,
            "Partial participation",
            _PARTIAL,
            (Claim("FedALIGN improves on the baselines, less than in Figure 1", "above both", _PARTIAL),),
        ),
        Figure(
            6,
            "More priority clients",
            _VARIOUS,
            (Claim("FedALIGN improves on the baselines, less with more priority clients", "above both", _VARIOUS),),
        ),
    )
}
