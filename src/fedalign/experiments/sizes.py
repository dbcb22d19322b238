"""The sizes of a model that follow from the data: features, classes, channels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.data.samples import Pool
from fedalign.experiments.federations import federation_of
from fedalign.registry import DATA, MODELS
from fedalign.settings.validation import options_of

_SIZES = ("inputs", "classes", "outputs", "channels")


def with_sizes(model: Any, settings: Mapping[str, Any], folder: Path | None) -> Any:
    """Add to a model's table the sizes that it needs and does not have, from the data of seed 0.

    ``settings`` holds the checked sections ``data`` and ``loss``. A model that has its sizes is returned as it is, and
    no data are read for it.
    """
    if not isinstance(model, str | Mapping):
        return model
    where, name, given = MODELS.split("model", model)
    options = options_of(MODELS.find(name, folder, where))
    needed = [
        key for key in _SIZES if key in options and key not in given and options[key].default is inspect.Parameter.empty
    ]
    if not needed:
        return model
    federation = federation_of(DATA.make(settings["data"], folder), 0, settings["data"]["kind"])
    found = sizes_of(federation.pool, one_logit=settings["loss"] == "binary-cross-entropy")
    return {"kind": name, **given, **{key: found[key] for key in needed if key in found}}


def sizes_of(pool: Pool, *, one_logit: bool = False) -> dict[str, int]:
    """Return the sizes of a model for these samples: ``classes`` are its outputs, also where labels are numbers.

    >>> import torch
    >>> sizes_of(Pool(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])))
    {'inputs': 3, 'classes': 3, 'outputs': 1}
    """
    each = int(pool.y[0].numel())
    classes = each
    if pool.has_classes and pool.y.dim() == 1 and not one_logit:
        classes = max(int(pool.y.max()) + 1, len(pool.classes or ()), 2)
    found = {"inputs": int(pool.x[0].numel()), "classes": classes, "outputs": each}
    if pool.x.dim() == 4:
        found["channels"] = int(pool.x.shape[1])
    return found
