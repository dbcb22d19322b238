"""Simulates the stacks of a sweep in several processes of this machine; each takes the next stack when it is free."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedalign.errors import FedalignError, FederationWarning
from fedalign.experiments.sweep import Run
from fedalign.experiments.sweep_stacks import Figures, OnRound, simulate_stack
from fedalign.protocol.records import RoundRecord
from fedalign.settings import user_modules

_MOST_WORKERS = 8  # each holds the data and a copy of PyTorch
_RUN_ROUNDS = 2000  # of less work a worker's start takes more time than it saves


def cores() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def usual_workers(runs: Sequence[Run], device: str) -> int:
    """Choose the number of processes: one on a GPU and for little work, else one for each core, at most 8."""
    work = sum(int(run.settings["rounds"]) for run in runs)
    return 1 if device != "cpu" else max(1, min(cores(), _MOST_WORKERS, len(runs), work // _RUN_ROUNDS))


def in_workers(
    stacks: Sequence[Sequence[Run]], folder: Path | None, device: str, workers: int, on_round: OnRound
) -> Iterator[tuple[Sequence[Run], list[Figures]]]:
    """Simulate stacks in processes; gives each with its figures as it finishes. Ends the processes in any case.

    Raises :class:`FedalignError` if a process fails, with what it said.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy PyTorch's threads in the middle of something
    tasks: Any = context.Queue()
    events: Any = context.Queue()
    for index in range(len(stacks)):
        tasks.put((index, list(stacks[index])))
    threads = max(1, cores() // workers)
    processes = [
        context.Process(target=_work, args=(tasks, events, folder, device, threads, os.getpid()), daemon=True)
        for _ in range(min(workers, len(stacks)))
    ]
    runs = {run.id: run for stack in stacks for run in stack}
    left = len(stacks)
    try:
        with _interrupts_ignored():
            for process in processes:
                process.start()
        while left:
            kind, *content = _next(events, processes)
            if kind == "round":
                on_round(runs[content[0]], content[1])
            elif kind == "figures":
                left -= 1
                yield stacks[content[0]], content[1]
            else:
                raise FedalignError(content[0])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for channel in (tasks, events):
            channel.cancel_join_thread()
            channel.close()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment; processes that are started meanwhile ignore it for good."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change what a signal does
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _next(events: Any, processes: Sequence[BaseProcess]) -> tuple[Any, ...]:
    """Wait for the next event; raises :class:`FedalignError` if a process has ended without saying why."""
    while True:
        try:
            event: tuple[Any, ...] = events.get(timeout=1.0)
            return event
        except queue.Empty:
            ended = [process for process in processes if process.exitcode is not None]
            if ended:
                raise FedalignError(
                    f"a worker process ended unexpectedly (exit code {ended[0].exitcode}), perhaps for want of memory; "
                    "finished runs are kept: go on with --resume, and with fewer --workers or a smaller --stack"
                ) from None


def _work(tasks: Any, events: Any, folder: Path | None, device: str, threads: int, parent: int) -> None:
    """Simulate stacks, in a process of its own, until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends its workers
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore", FederationWarning)  # the parent has said them

    def on_round(run: Run, record: RoundRecord) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the parent was killed
        events.put(("round", run.id, record_for_progress(record)))

    while True:
        try:
            index, stack = tasks.get(timeout=5.0)
        except queue.Empty:
            if os.getppid() != parent:
                os._exit(1)
            continue
        try:
            events.put(("figures", index, simulate_stack(stack, folder, device, on_round)))
        except FedalignError as error:
            events.put(("refused", str(error)))
        except Exception as error:
            words = user_modules.blame(error)
            words = f"your own code failed: {words}" if words else f"a worker failed: {user_modules.in_words(error)}"
            events.put(("failed", words))


def record_for_progress(record: RoundRecord) -> RoundRecord:
    """Leave a record's clients out, which are most of its size."""
    return dataclasses.replace(record, clients=(), tried=())
