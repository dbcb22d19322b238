"""A client's data, and the measuring and training of models on it, with the engine that simulations use."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedalign.aggregation.update_steps import UpdateContext, sent_model
from fedalign.data.federation import Federation
from fedalign.data.samples import Arrays
from fedalign.errors import FedalignError, FederationWarning
from fedalign.flower.client_metrics import split_over_flower
from fedalign.flower.packing import Packing
from fedalign.flower.settings import Settings, function
from fedalign.metrics.metric import failure
from fedalign.personal.method import PersonalOutcome, head_of
from fedalign.protocol.messages import Outcomes
from fedalign.rules.rule import Measure, Split
from fedalign.simulation.device import matmul_precision, resolve_device
from fedalign.simulation.engine.jobs import Data, EvalJob, TrainJob
from fedalign.simulation.engine.named import make_engine
from fedalign.simulation.engine.outputs import OutputReader
from fedalign.simulation.engine.pairs import PairJob
from fedalign.simulation.model_checks import check_model, check_repeatable
from fedalign.simulation.personal_work import FinishedRun, personal_outcomes
from fedalign.simulation.spec import check_personal


@dataclass(frozen=True)
class ClientData:
    """A client's data: features and labels of each split. Without ``heldout``, some training data is held out.

    ``heldout_fraction`` says how much. ``mean`` and ``std`` normalise features; uint8 images are first divided by 255.

    >>> data = ClientData((torch.randn(50, 4), torch.arange(50) % 2))
    >>> len(data.federation(seed=0).clients[0].heldout)
    10
    """

    train: Arrays
    heldout: Arrays | None = None
    test: Arrays | None = None
    heldout_fraction: float = 0.2
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    def federation(self, seed: int) -> Federation:
        """Make a federation of this one client, which the engine takes; ``seed`` fixes which samples are held out."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "all 1 clients are priority", FederationWarning)
            return Federation.from_arrays(
                [self.train],
                None if self.heldout is None else [self.heldout],
                None if self.test is None else [self.test],
                priority=[True],
                heldout_fraction=self.heldout_fraction,
                seed=seed,
                mean=self.mean,
                std=self.std,
            )


class Node:
    """A client with its data and model loaded, ready to measure and train.

    Raises :class:`FedalignError` if the data function returns something else than data, or if model, data and loss do
    not go together.
    """

    def __init__(self, settings: Settings, node_config: Mapping[str, Any]) -> None:
        given = function(settings.data)(dict(node_config))
        if isinstance(given, tuple) and len(given) == 2:
            given = ClientData(given)
        if not isinstance(given, ClientData):
            raise FedalignError(
                f"{settings.data} must return a fedalign.flower.ClientData, or features and labels, not {given!r:.60}"
            )
        self.settings = settings
        self._federation = given.federation(settings.seed)
        self._client = self._federation.clients[0]
        template = settings.make_module()
        check_repeatable(template)
        device = resolve_device(settings.device)
        data = Data([self._federation.pool], device, next(template.parameters()).dtype)
        recipe = settings.recipe
        self._local, self._client_steps = settings.make_local(), recipe.client_steps
        self._personal = settings.make_personal()
        for method in self._personal.values():
            method.check(template)
        accuracy = check_model(template, data, [self._federation], recipe.loss)
        if settings.make_rule().needs_accuracy and not accuracy:
            raise FedalignError("matching on accuracy needs a task with classes; this one has none: use match='loss'")
        self._engine = make_engine(
            settings.engine, template, recipe.loss, data, settings.chunk or None, accuracy=accuracy
        )
        self.layout, self._device = self._engine.layout, device
        self.packing, self._template = Packing.of(settings), template
        self._outputs = OutputReader(template, self.layout, data) if settings.metrics else None

    def samples(self) -> dict[str, int]:
        """Return the number of samples in every split."""
        return {split: len(self._client.rows(split)) for split in ("train", "heldout", "test")}

    def fingerprint(self) -> str:
        """Return a short hash of this client's data: the server sees whether it changed, and nothing else of it."""
        pool, found = self._federation.pool, hashlib.sha256(b"fedalign")
        for split in ("train", "heldout", "test"):
            for rows in torch.split(torch.as_tensor(self._client.rows(split)), 4096):  # in pieces: data may be large
                for part in (pool.x[rows], pool.y[rows]):
                    found.update(f"{split} {part.dtype} {tuple(part.shape)}".encode())
                    found.update(part.contiguous().cpu().view(torch.uint8).numpy().data if part.numel() else b"")
        return found.hexdigest()[:16]

    def named_tensors(self, model: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a flat model's tensors, with the names that they have in the module's ``state_dict``."""
        module = copy.deepcopy(self._template)
        self.layout.load(module, model)
        return dict(module.state_dict())

    def measure(self, models: Sequence[torch.Tensor], split: Split, tempered: bool = False) -> list[Measure] | None:
        """Measure models on one split; None if the client has no samples in it.

        With ``tempered``, the measures have the losses at other temperatures, too.
        """
        rows = self._client.rows(split)
        if not len(rows):
            return None
        with matmul_precision(self.settings.tf32):
            pool = self._federation.pool
            return self._engine.evaluate([EvalJob(m.to(self._device), pool, rows, tempered) for m in models])

    def metrics(self, model: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of the settings on this client's data; what is undefined, or has no data, is missing.

        Raises :class:`FedalignError` if a metric fails.
        """
        found: dict[str, float] = {}
        for name, metric in self.settings.make_metrics().items():
            rows = self._client.rows(split_over_flower(metric))
            if len(rows) and self._outputs is not None:
                samples = self._outputs.read({0: model.to(self._device)}, self._federation.pool, {0: rows})
                try:
                    values = metric.compute(name, [samples[0]])
                except Exception as error:
                    raise failure(name, "this client", error) from error
                found |= {key: value for key, value in values.items() if value is not None}
        return found

    def compare(self, models: Sequence[torch.Tensor], split: Split) -> Outcomes | None:
        """Compare two models sample by sample on one split; None without samples or without classes.

        Raises :class:`FedalignError` for another number of models.
        """
        if len(models) != 2:
            raise FedalignError(f"two models can be compared sample by sample, not {len(models)}")
        first, second = (model.to(self._device) for model in models)
        job = PairJob((first, second), self._federation.pool, {0: self._client.rows(split)})
        with matmul_precision(self.settings.tf32):
            return self._engine.pairs.compare([job])[0].get(0)

    @property
    def is_personal(self) -> bool:
        """Whether the settings have personal methods."""
        return bool(self._personal)

    def personalise(self, model: torch.Tensor, client: int, rounds: int) -> dict[str, PersonalOutcome]:
        """Make personal models of the final model by the methods of the settings, and measure them.

        Raises :class:`FedalignError` if this client has no held-out data that a method needs.
        """
        check_personal(self._personal, self._federation)
        run = FinishedRun(
            self._federation,
            self._personal,
            served=model.to(self._device),
            initial=self.layout.flatten(self._template).to(self._device),
            local=self._local,
            seed=self.settings.seed,
            rounds=rounds,
            head=head_of(self._template),
            keep=True,
            number=client,
        )
        with matmul_precision(self.settings.tf32):
            (found,) = personal_outcomes(self._engine, [run])
        return {name: outcomes[0] for name, outcomes in found.items()}

    def train(
        self, model: torch.Tensor, client: int, round: int, rounds: int, correction: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Train a model in a round, apply the client steps, and return the model to send.

        ``client`` is the client's number in the roster. With the seed and the round it fixes all random draws.
        ``correction`` is SCAFFOLD's, which every step adds to its gradient.
        """
        seed = self.settings.seed
        job = TrainJob(
            model.to(self._device), self._federation.pool, self._client.train, self._local, seed, round, rounds, client,
            None if correction is None else correction.to(self._device),
        )  # fmt: skip
        with matmul_precision(self.settings.tf32):
            (trained,) = self._engine.train([job])
        context, size = UpdateContext(seed, round, client), self.layout.trainable_size
        return sent_model(trained.model, job.model, self._client_steps, context, size)
