"""Makes the callbacks that write the runs of an experiment, and chooses how often they write checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedalign.experiments.config import Experiment
from fedalign.experiments.recorder import Recorder
from fedalign.experiments.store import RunStore
from fedalign.rules.auto import AutoAlign
from fedalign.rules.baselines import Alone
from fedalign.rules.blend import Blend
from fedalign.rules.verified import Verified
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.model_checks import check_repeatable
from fedalign.simulation.spec import RunSpec, initial_module

_BYTES_A_ROUND = 64 << 20  # of checkpoints, on average


def make_recorders(experiment: Experiment, specs: Sequence[RunSpec], stores: Sequence[RunStore]) -> list[Recorder]:
    """Make the callbacks that write runs; checkpoints are rarer where the models are very large."""
    module = initial_module(experiment.model, 0)
    check_repeatable(module)
    layout = Layout(module)
    size = layout.size * torch.empty(0, dtype=layout.dtype).element_size()
    every = max(1, -(-sum(models_kept(spec) for spec in specs) * size // _BYTES_A_ROUND))
    return [Recorder(store, spec.federation, spec.rounds, every) for spec, store in zip(specs, stores, strict=True)]


def models_kept(spec: RunSpec) -> int:
    """Count the models' worth of numbers in a run's checkpoint."""
    clients = len(spec.federation)
    if isinstance(spec.rule, Alone):
        return clients
    rule, moments = spec.rule, 3 if spec.server is not None else 1
    controls = clients + 1 if spec.local.scaffold else 0
    if isinstance(rule, Verified):  # the served model, the training model and the priority-only model
        return 1 + 2 * moments
    if isinstance(rule, Blend):
        return (3 if rule.fallback else 2) * moments
    branches = 2 if isinstance(rule, AutoAlign) and rule.fallback else 1
    training = 1 if isinstance(rule, AutoAlign) and rule.has_training_model else 0
    return training + branches * moments + controls
