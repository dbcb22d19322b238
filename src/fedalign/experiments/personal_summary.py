"""What clients gain by personal models: the part ``personal`` of ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # of clients.json
Tests = Mapping[str, Mapping[int, Sequence[Row]]]  # rows by arm and seed
SHARED = "shared"  #: the name of the final model itself among the personal methods


def personal_summary(tests: Tests, alone: str | None = None) -> dict[str, Any]:
    """Compare, for every arm and for free and priority clients apart, the shared model and the personal ones.

    Gives, by arm, ``free`` or ``priority`` and model: ``accuracy``, the clients' mean test accuracy; ``own``, that of
    the models that the same clients trained alone (arm ``alone``); ``gain``, the mean difference; ``better_off`` and
    ``worse_off``, how many clients have a higher or a lower accuracy than alone; ``clients``, how many there are. All
    are means over seeds. What compares with ``own`` is None without such an arm. Empty without personal models.
    """
    found: dict[str, Any] = {}
    for arm, seeds in tests.items():
        methods = list(
            dict.fromkeys(name for rows in seeds.values() for row in rows for name in row.get("personal", {}))
        )
        if not methods:
            continue
        own = {
            (seed, row["id"]): row["test_accuracy"] for seed, rows in tests.get(alone or "", {}).items() for row in rows
        }
        found[arm] = {
            group: {
                name: figures
                for name in (SHARED, *methods)
                if (figures := _over_seeds(seeds, name, priority, own)) is not None
            }
            for group, priority in (("free", False), ("priority", True))
        }
    return found


def with_own(rows: Sequence[Row], alone: Sequence[Row]) -> list[dict[str, Any]]:
    """Add to the lines of ``clients.json`` each client's accuracy with the model that it trained alone.

    >>> with_own([{"id": 0, "personal": {}}], [{"id": 0, "test_accuracy": 0.5}])
    [{'id': 0, 'personal': {}, 'own_accuracy': 0.5}]
    """
    own = {row["id"]: row["test_accuracy"] for row in alone}
    return [{**row, "own_accuracy": own.get(row["id"])} for row in rows]


def accuracy_of(row: Row, model: str) -> float | None:
    """Return a client's test accuracy with the shared model or with a personal one."""
    value = row["test_accuracy"] if model == SHARED else row.get("personal", {}).get(model, {}).get("test_accuracy")
    return None if value is None else float(value)


def _over_seeds(
    seeds: Mapping[int, Sequence[Row]], model: str, priority: bool, own: Mapping[tuple[int, int], float | None]
) -> dict[str, Any] | None:
    each = []
    for seed, rows in seeds.items():
        pairs = [(accuracy_of(row, model), own.get((seed, row["id"]))) for row in rows if row["priority"] == priority]
        having = [(mine, alone) for mine, alone in pairs if mine is not None]
        if having:
            each.append(_of_seed(having))
    if not each:
        return None
    return {key: _mean(figures[key] for figures in each) for key in each[0]}


def _of_seed(pairs: Sequence[tuple[float, float | None]]) -> dict[str, float | None]:
    known = [(mine, alone) for mine, alone in pairs if alone is not None]
    return {
        "accuracy": _mean(mine for mine, _ in pairs),
        "own": _mean(alone for _, alone in known),
        "gain": _mean(mine - alone for mine, alone in known),
        "better_off": float(sum(mine > alone for mine, alone in known)) if known else None,
        "worse_off": float(sum(mine < alone for mine, alone in known)) if known else None,
        "clients": float(len(pairs)),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
