"""The fast engine: trains the clients of all runs together, stacked in chunks that fit the CPU's cache or the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedalign.errors import FedalignError, FederationWarning
from fedalign.protocol.calibration import TEMPERATURES
from fedalign.rules.rule import Measure
from fedalign.simulation.engine.jobs import Data, EvalJob, Trained, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.linear_chain import LinearChainStepper, chain
from fedalign.simulation.engine.pairs import PairComparer
from fedalign.simulation.engine.processor import in_threads, last_level_cache
from fedalign.simulation.engine.vmapped import VmapStepper
from fedalign.training.losses import PerSampleLoss, hits, quick_tempered_losses, takes_logits, tempered_losses

# The memory that one chunk may use in a step: so many bytes on a GPU, a share of the last-level cache on a CPU.
_GPU_BYTES = 2 << 30
_CACHE_SHARE = 3 / 8
_EVAL_BYTES = 16 << 20  # of inputs and activations, on a CPU
_ALIGNED = 16  # samples: a multiple of this many float32 numbers fills whole cache lines
_LAYERS = 40  # the size of a convolutional model's patches and activations, in multiples of its input
Done = tuple[torch.Tensor, torch.Tensor]  # stacked models, and whether each is finite


class Stepper(Protocol):
    """Trains and evaluates a stack of clients; there is one implementation for each kind of model."""

    def forward(self, models: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs of stacked models on stacked samples."""
        ...

    def train(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor:
        """Do every job's local work from the stacked flat ``models``; give the stacked flat results."""
        ...


class BatchedEngine:
    """Trains clients in stacks of ``chunk`` clients (default: chosen from the model's and the batch's size)."""

    def __init__(
        self,
        template: nn.Module,
        loss: PerSampleLoss,
        data: Data,
        chunk: int | None = None,
        *,
        accuracy: bool = True,
    ) -> None:
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise FedalignError(f"chunk must be a whole number of at least 1, not {chunk!r}")
        self._accuracy = accuracy
        self.device = data.device
        self.layout = Layout(template)
        self._loss, self._data, self._chunk = loss, data, chunk
        self.pairs = PairComparer(template, self.layout, data, classes=accuracy)
        layers = chain(template, flat_samples=data.x.dim() == 2)
        self._stepper: Stepper
        if layers is not None:
            self._stepper = LinearChainStepper(layers, self.layout, loss, data)
            self._one_by_one = False
        else:
            functional = VmapStepper(template, self.layout, loss, data)
            self._stepper = functional
            self._one_by_one = self._prefers_one_by_one(template, functional)

    def evaluate(self, jobs: Sequence[EvalJob]) -> list[Measure]:
        """Measure losses and accuracies. Jobs of one model are evaluated together, similar counts stacked."""
        order: list[int] = []
        # All sums go into two tensors: small results that outlive the large ones beside them would fragment memory.
        losses = torch.zeros(len(jobs), dtype=torch.float64, device=self.device)
        right = torch.zeros_like(losses)
        tempers = takes_logits(self._loss) and any(job.tempered for job in jobs)
        tempered = losses.new_zeros(len(jobs), len(TEMPERATURES) if tempers else 0)
        with torch.no_grad():
            for group in self._eval_groups(jobs):
                begin = len(order)
                order += [j for members in group for j in members]
                outputs, y, lengths = self._eval_group(jobs, group)
                here = slice(begin, len(order))
                losses[here] = torch.segment_reduce(self._loss(outputs, y).double(), "sum", lengths=lengths)
                if self._accuracy:
                    right[here] = torch.segment_reduce(hits(outputs, y), "sum", lengths=lengths)
                for quick, losses_at in ((False, tempered_losses), (True, quick_tempered_losses)):
                    asked = [i for i, j in enumerate(order[here]) if jobs[j].tempered and jobs[j].quick == quick]
                    if tempers and asked:
                        every = losses_at(self._loss, outputs, y, TEMPERATURES)
                        sums = torch.segment_reduce(every, "sum", lengths=lengths, axis=0)
                        where = torch.tensor(asked, device=self.device)
                        tempered[where + begin] = sums[where]
        measures: dict[int, Measure] = {}
        for j, loss, hit, others in zip(order, losses.tolist(), right.tolist(), tempered.tolist(), strict=True):
            n = len(jobs[j].rows)
            curve = tuple(value / n for value in others) if jobs[j].tempered else ()
            measures[j] = Measure(loss / n, hit / n if self._accuracy else None, n, curve)
        return [measures[j] for j in range(len(jobs))]

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[Trained]:
        """Train all jobs. Jobs with the same local work and width are sorted by number of steps and cut into chunks."""
        kinds: list[TrainJob] = []
        groups: dict[tuple[int, ...], list[int]] = {}
        for j, job in enumerate(jobs):
            kind = next((i for i, known in enumerate(kinds) if _alike(known, job)), len(kinds))
            if kind == len(kinds):
                kinds.append(job)
            groups.setdefault((-job.width, kind, job.round, job.rounds), []).append(j)
        # By width, so that the order of one run's clients doesn't depend on the other runs.
        chunks = [chunk for _, members in sorted(groups.items()) for chunk in self._chunks(jobs, members)]

        def work(chunk: list[int]) -> Done:
            mine = [jobs[j] for j in chunk]
            with torch.no_grad():
                models = self._stepper.train(_stack([job.model for job in mine]), mine)
                return models, torch.isfinite(models).all(1)

        threads = torch.get_num_threads()
        # A stack uses the stepper's one module, so only clients that train one by one may train in threads.
        single = self._one_by_one and all(len(chunk) == 1 for chunk in chunks)
        parallel = single and self.device.type == "cpu" and threads > 1 and len(chunks) > 1
        done = in_threads(work, chunks, threads) if parallel else map(work, chunks)
        for chunk, (models, finite) in zip(chunks, done, strict=True):
            for place, j in enumerate(chunk):
                yield Trained(j, models[place], finite[place])

    def _chunks(self, jobs: Sequence[TrainJob], members: Sequence[int]) -> Iterator[list[int]]:
        by_steps = sorted(members, key=lambda j: -jobs[j].steps)
        size = self._chunk or self._chunk_size([jobs[j] for j in by_steps])
        if self._chunk is None and size > 1:
            # Even chunks, and in each the same number of clients for every thread.
            threads = torch.get_num_threads() if self.device.type == "cpu" else 1
            even = -(-len(by_steps) // -(-len(by_steps) // size))
            size = -(-even // threads) * threads
        for start in range(0, len(by_steps), size):
            yield by_steps[start : start + size]

    def _chunk_size(self, jobs: Sequence[TrainJob]) -> int:
        if self._one_by_one:
            return 1
        layers = 2 if isinstance(self._stepper, LinearChainStepper) else _LAYERS
        touched = 4 * (self.layout.size + layers * jobs[0].width * self._data.features)
        if self.device.type == "cuda":
            return max(1, _GPU_BYTES // touched)
        return max(1, int(_CACHE_SHARE * last_level_cache()) // touched)

    def _rows_at_once(self) -> int:
        """Count the samples that may be evaluated at once."""
        layers = 1 if isinstance(self._stepper, LinearChainStepper) else _LAYERS / 4  # inputs and activations
        allowed = _EVAL_BYTES if self.device.type == "cpu" else _GPU_BYTES
        return max(1, int(allowed // (4 * self._data.features * layers)))

    def _eval_groups(self, jobs: Sequence[EvalJob]) -> Iterator[list[list[int]]]:
        """Group jobs by model, then stack models with similar sample counts, within the memory allowed.

        On a CPU only equal counts (after padding) are stacked: a product of another shape may round differently, and a
        model's measures must not depend on what else is measured.
        """
        by_model: dict[int, list[int]] = {}
        for j, job in enumerate(jobs):
            by_model.setdefault(id(job.model), []).append(j)
        sized = [(self._padded(sum(len(jobs[j].rows) for j in m)), m) for m in by_model.values()]
        sized.sort(key=lambda s: -s[0])
        limit = self._rows_at_once()
        group: list[list[int]] = []
        widest = 0
        for rows, members in sized:
            least = widest if self.device.type == "cpu" else widest // 2
            full = (len(group) + 1) * widest > limit or rows < least or self._one_by_one
            if group and full:
                yield group
                group = []
            widest = widest if group else rows
            group.append(members)
        if group:
            yield group

    def _eval_group(
        self, jobs: Sequence[EvalJob], group: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute one group's outputs, its labels, and how many rows each of its jobs has."""
        per_model = [np.concatenate([self._data.rows(jobs[j].pool, jobs[j].rows) for j in m]) for m in group]
        lengths = torch.tensor([len(jobs[j].rows) for m in group for j in m], device=self.device)
        models = torch.stack([jobs[m[0]].model for m in group])
        limit = self._rows_at_once()
        widest = self._padded(max(len(rows) for rows in per_model))
        single = len(group) == 1 and self.device.type == "cpu" and not self._one_by_one and widest <= limit
        if len(group) == 1 and not single:
            rows = torch.from_numpy(per_model[0]).to(self.device)
            parts = [self._forward_rows(models, part) for part in torch.split(rows, limit)]
            return torch.cat([outputs for outputs, _ in parts]), torch.cat([y for _, y in parts]), lengths
        if single:
            # A single matrix product is split over threads and rounds differently than a batch of products, one per
            # thread. So a single model gets an empty second one: measures then depend neither on what else is
            # measured nor on the number of threads.
            models, per_model = models.expand(2, -1), [per_model[0], per_model[0][:0]]
        padded = np.zeros((len(per_model), widest), np.int64)
        real = np.zeros((len(per_model), widest), bool)
        for i, mine in enumerate(per_model):
            padded[i, : len(mine)], real[i, : len(mine)] = mine, True
        x, y = self._shared_batch(padded)
        outputs = self._stepper.forward(models, x)
        if real.all():
            return outputs.flatten(0, 1), y.flatten(0, 1), lengths
        keep = torch.from_numpy(np.flatnonzero(real)).to(self.device)
        return outputs.flatten(0, 1)[keep], y.flatten(0, 1)[keep], lengths

    def _shared_batch(self, padded: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather samples for each row of an index; equal rows, of models measured on the same data, only once."""
        places: dict[bytes, int] = {}
        index = [places.setdefault(row.tobytes(), len(places)) for row in padded]
        if len(places) == len(padded):
            return self._data.batch(torch.from_numpy(padded).to(self.device))
        first = [index.index(place) for place in range(len(places))]
        x, y = self._data.batch(torch.from_numpy(padded[first]).to(self.device))
        if len(places) == 1:  # not copied for every model
            return x.expand(len(padded), *x.shape[1:]), y.expand(len(padded), *y.shape[1:])
        where = torch.tensor(index, device=self.device)
        return x.index_select(0, where), y.index_select(0, where)

    def _padded(self, rows: int) -> int:
        """Round up, on a CPU, so that every model's samples begin at an address aligned for the matmul kernel."""
        return -(-rows // _ALIGNED) * _ALIGNED if self.device.type == "cpu" and not self._one_by_one else rows

    def _forward_rows(self, models: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self._data.batch(rows)
        return self._stepper.forward(models, x.unsqueeze(0))[0], y

    def _prefers_one_by_one(self, template: nn.Module, stepper: VmapStepper) -> bool:
        if self.device.type == "cpu" and any(isinstance(m, nn.modules.conv._ConvNd) for m in template.modules()):
            return True
        why = stepper.why_not_stacked(template)
        if why is not None:
            warnings.warn(
                f"this model cannot be vectorised over clients ({why}); they are trained one by one",
                FederationWarning,
                stacklevel=5,
            )
        return why is not None


def _alike(known: TrainJob, job: TrainJob) -> bool:
    """Say whether two jobs have the same local work, so that they can be stacked."""
    return known.only == job.only and (known.local is job.local or known.local == job.local)


def _stack(models: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack models for reading; the clients of one run start from the same model, which is then not copied."""
    first = models[0]
    return first.expand(len(models), -1) if all(model is first for model in models) else torch.stack(list(models))
