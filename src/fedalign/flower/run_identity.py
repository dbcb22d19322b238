"""What a run is about: its model, its clients and their data, in ``identity.json`` of its folder.

A run that is resumed compares itself with it. So another model is refused with that reason, clients keep their numbers,
and changed data is noticed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cattrs
from torch import nn

from fedalign.errors import FedalignError
from fedalign.experiments.durable_files import write_durably
from fedalign.flower.members import Members
from fedalign.flower.roster_file import Entry, RosterFile, stranger

NAME = "identity.json"


@dataclass(frozen=True)
class ModelIdentity:
    """A model's tensors, each with its type and shape, and its layers as PyTorch prints them."""

    tensors: dict[str, str]
    layers: str

    @classmethod
    def of(cls, module: nn.Module) -> ModelIdentity:
        """Describe a model.

        >>> ModelIdentity.of(nn.Linear(3, 2)).tensors
        {'weight': 'float32 2×3', 'bias': 'float32 2'}
        """
        tensors = {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {'×'.join(map(str, tensor.shape))}".strip()
            for name, tensor in module.state_dict().items()
        }
        return cls(tensors, str(module))

    def difference(self, now: ModelIdentity) -> str | None:
        """Say how another model's tensors differ from this one's; None if they do not.

        >>> ModelIdentity.of(nn.Linear(3, 2)).difference(ModelIdentity.of(nn.Linear(3, 4)))
        'weight was float32 2×3, is float32 4×3'
        """
        for name in dict.fromkeys([*self.tensors, *now.tensors]):
            was, is_ = self.tensors.get(name, "missing"), now.tensors.get(name, "missing")
            if was != is_:
                return f"{name} was {was}, is {is_}"
        return None


@dataclass
class DataIdentity:
    """What a client said of its data when the run began, or when it joined: its training samples and a fingerprint."""

    train: int
    fingerprint: str = ""


@dataclass
class RunIdentity:
    """The model, the number of warm-up rounds, the clients' entries by number, and their data by the client's key.

    ``removed`` has the keys of clients that are no longer in the roster.
    """

    model: ModelIdentity
    warmup: int
    clients: list[Entry] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    data: MutableMapping[str, DataIdentity] = field(default_factory=dict)

    def keep(self, folder: Path, members: Members) -> None:
        """Write it into a run's folder with the clients as they are now, unless the file has all that already."""
        self.clients = list(members.entries)
        self.removed = [entry.key for k, entry in enumerate(self.clients) if members.is_removed(k)]
        path, text = folder / NAME, json.dumps(asdict(self), indent=1) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_durably(path, text)

    def roster(self) -> dict[str, Entry]:
        """Return the clients by their key, without those that were removed."""
        return {entry.key: entry for entry in self.clients if entry.key not in self.removed}

    def check_model(self, now: ModelIdentity, folder: Path) -> str | None:
        """Raise :class:`FedalignError` if a run is resumed with another model; return a warning if its layers changed.

        A change of PyTorch's version may change how layers are printed, so that alone is no error.
        """
        if (difference := self.model.difference(now)) is not None:
            raise FedalignError(f"{folder} was run with another model: {difference}; resume it with the model it had")
        if self.model.layers != now.layers:
            return f"the model's layers were {_line(self.model.layers)} and are {_line(now.layers)}"
        return None


def read_identity(folder: Path) -> RunIdentity | None:
    """Read a run's identity; None for a run of an earlier version. Raises :class:`FedalignError` if it is damaged."""
    path = folder / NAME
    try:
        found: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
        return cattrs.structure(found, RunIdentity)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
        raise FedalignError(f"{path} cannot be read: {type(error).__name__}") from error


def former_members(
    roster: RosterFile, identity: RunIdentity | None, free_cap: float, free_total: float = math.inf
) -> Members:
    """Return the clients of a roster. Those of a run that is resumed keep the numbers that they had.

    Strangers that took part stay, if the roster still lets strangers take part.
    """
    former = [] if identity is None else identity.clients
    members = Members(former or roster.entries, free_cap, free_total)
    known = {entry.key for entry in roster.entries}
    strangers = [entry for entry in former if entry.key not in known and entry.name == stranger(entry.key).name]
    members.edit([*roster.entries, *(strangers if roster.unknown == "free" else [])])
    return members


def _line(layers: str) -> str:
    return " ".join(layers.split())
