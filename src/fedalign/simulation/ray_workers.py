"""Runs spread over GPUs or machines with Ray.

Each worker simulates some of the runs together, as one machine would simulate all of them. A client's bits on a
CPU don't depend on its neighbours, so the results are those of a local run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fedalign.callbacks import Callback, close_all, may_stop, notify_end, notify_error, notify_round, notify_stopped
from fedalign.errors import DivergedError, FedalignError
from fedalign.protocol.messages import RoundDone
from fedalign.settings import user_modules
from fedalign.simulation.driver import Event
from fedalign.simulation.engine.named import EngineName
from fedalign.simulation.simulation import Simulation, SimulationResult
from fedalign.simulation.spec import ModelFactory, RunSpec
from fedalign.training.losses import PerSampleLoss, cross_entropy


class RaySimulation:
    """Several runs of one model, checked here and simulated by Ray's workers. Used as :class:`Simulation` is.

    Ray's cluster is the one that ``RAY_ADDRESS`` names or that was started on this machine, else a local one. By
    default there is a worker for each of its GPUs, or for each machine if there is none.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        model: ModelFactory | nn.Module,
        *,
        loss: PerSampleLoss = cross_entropy,
        device: str = "auto",
        tf32: bool = False,
        engine: EngineName = "batched",
        chunk: int | None = None,
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise FedalignError(f"workers must be at least 1, not {workers}")
        ray = _ray()
        gpus, machines, cores = _cluster(ray)
        if device not in ("auto", "cpu", "cuda"):
            raise FedalignError(f"on Ray, device must be auto, cpu or cuda, not {device!r}")
        if device == "cuda" and not gpus:
            raise FedalignError("device 'cuda' was asked for, but Ray's cluster has no GPU; use --device cpu")
        self.device = torch.device("cuda" if gpus and device != "cpu" else "cpu")
        self._here = Simulation(specs, model, loss=loss, device="cpu")  # says what is wrong before a worker starts
        # Callbacks that add to records or may stop a run work beside the simulation, in the workers; the others here.
        self._specs, self._model = [_for_worker(spec) for spec in specs], model
        self._infos = [spec.info for spec in specs]
        self._callbacks = [[c for c in spec.callbacks if not _in_worker(c)] for spec in specs]
        self._options = {"loss": loss, "device": self.device.type, "tf32": tf32, "engine": engine, "chunk": chunk}
        count = min(len(specs), workers or (gpus if self.device.type == "cuda" else machines))
        self._shares = [list(range(first, len(specs), count)) for first in range(count)]
        if self.device.type == "cuda":
            self._needs = {"num_gpus": min(1.0, gpus / count), "num_cpus": 1}
        else:
            self._needs = {"num_cpus": max(1, cores * machines // count)}
        self._results: dict[int, SimulationResult] = {}

    def rounds(self) -> Iterator[list[Event]]:
        """Start the workers; give what happened as they report it, one worker's round at a time."""
        ray = _ray()
        for module in user_modules.loaded():
            ray.cloudpickle.register_pickle_by_value(module)  # a worker cannot import what lies beside our settings
        work = ray.remote(num_returns="streaming", max_retries=0, **self._needs)(_work)
        streams = {}
        for share in self._shares:
            specs = [self._specs[i] for i in share]
            streams[work.remote(specs, self._model, self._options, self._needs["num_cpus"])] = share
        try:
            for info, callbacks in zip(self._infos, self._callbacks, strict=True):
                for callback in callbacks:
                    callback.on_start(info)
            while streams:
                ready, _ = ray.wait(list(streams), num_returns=1)
                for stream in ready:
                    share = streams[stream]
                    try:
                        kind, content = ray.get(next(stream))
                    except StopIteration:
                        del streams[stream]
                        continue
                    except ray.exceptions.RayError as error:
                        why = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
                        raise FedalignError(
                            f"a Ray worker failed ({why}); finished rounds are kept: go on with --resume"
                        ) from error
                    if kind == "results":
                        self._results |= dict(zip(share, content, strict=True))
                    elif kind == "stops":
                        for place, stopped in content.items():
                            notify_stopped(self._callbacks[share[place]], stopped)
                    else:
                        yield [(share[place], self._notify(share[place], event)) for place, event in content]
            notify_end(zip(self._callbacks, self.results(), strict=True))
        finally:
            for stream in streams:
                ray.cancel(stream, force=True)
            close_all([callback for callbacks in self._callbacks for callback in callbacks])

    def _notify(self, run: int, event: RoundDone | DivergedError) -> RoundDone | DivergedError:
        if isinstance(event, DivergedError):
            notify_error(self._callbacks[run], event)
            return event
        return notify_round(self._callbacks[run], event, self._here.module)

    def results(self) -> list[SimulationResult]:
        """Return the runs' results, after the last round."""
        return [self._results[i] for i in range(len(self._specs))]


def _for_worker(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, callbacks=[callback for callback in spec.callbacks if _in_worker(callback)])


def _in_worker(callback: Callback) -> bool:
    return callback.changes_records or may_stop(callback)


def _work(
    specs: list[RunSpec], model: ModelFactory | nn.Module, options: dict[str, Any], cores: int
) -> Iterator[tuple[str, Any]]:
    """Simulate, in a worker; models travel from the CPU's memory."""
    if options["device"] == "cpu":
        torch.set_num_threads(cores)
    simulation = Simulation(specs, model, **options)
    told: set[int] = set()
    for events in simulation.rounds():
        yield "events", [(place, _on_cpu(event)) for place, event in events]
        if new := {place: stopped for place, stopped in simulation.stops.items() if place not in told}:
            told |= set(new)
            yield "stops", new
    yield "results", simulation.results()


def _on_cpu(event: Any) -> Any:
    if not isinstance(event, RoundDone):
        return event
    models, snapshot = event.model, event.snapshot
    held = tuple(m.cpu() for m in models) if isinstance(models, tuple) else models.cpu()
    tensors = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
    return RoundDone(event.record, held, dataclasses.replace(snapshot, tensors=tensors))


def _ray() -> Any:
    """Import Ray and join its cluster, or start one here."""
    try:
        import ray
    except ImportError as error:
        raise FedalignError("Ray is not installed: pip install 'fedalign[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable Ray's telemetry
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # and spare the user Ray's tip about this
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise FedalignError(f"cannot join Ray's cluster: {error}") from error
    return ray


def _cluster(ray: Any) -> tuple[int, int, int]:
    """Count GPUs, machines, and the cores that every machine has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    with_cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    return gpus, len(with_cores) or 1, min(with_cores, default=1)
