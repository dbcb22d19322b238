"""The short form of the clients' local work: ``optimizer``, ``lr``, ``epochs`` … in place of the table ``local``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedalign.errors import FedalignError
from fedalign.registry import LOCAL_OPTIMIZERS
from fedalign.settings.validation import check_given, options_of

if TYPE_CHECKING:
    from fedalign.flower.settings import Settings

LOCAL_KEYS = ("optimizer", "lr", "epochs", "batch_size", "momentum", "weight_decay", "clip", "mu")


def local_table(settings: Settings) -> dict[str, Any]:
    """Return the table ``local`` that the short settings mean.

    Raises :class:`FedalignError` for a setting that the optimiser has no option for.
    """
    where, name, options = LOCAL_OPTIMIZERS.split("optimizer", settings.optimizer)
    known = options_of(LOCAL_OPTIMIZERS.find(name, where=where))
    usual: dict[str, Any] = {key: getattr(settings, key) for key in LOCAL_KEYS if key != "optimizer"}
    if "steps" in options:
        del usual["epochs"]
    for key in ("weight_decay", "clip"):
        if not usual[key]:
            del usual[key]  # then the optimiser has its own default, which is not 0 for AdamW
    for key in [key for key in usual if key not in known]:
        if usual.pop(key):
            raise FedalignError(f"{key.replace('_', '-')} is set, but the optimizer {name!r} has no such option")
    return {"kind": name, **usual, **check_given("optimizer", options, known)}
