"""The bytes of a round for each client, as Flower sends them: limits that hold for 10 million parameters, scaled down.

`python benchmarks/flower_bytes.py` measures the 10 million themselves.
"""

import bandwidth
import pytest
from bandwidth import NODES, PRIORITY, measure

PARAMETERS = 500_000
MILLION = PARAMETERS / 10_000_000 * 1e6  # bytes: what a megabyte is for a model of 10 million parameters


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedalign.report.page.gallery", lambda run: [])  # drawing takes longer than the runs
    monkeypatch.setitem(bandwidth.WIDTH, "parameters", PARAMETERS)


@pytest.mark.parametrize(
    ("rule", "transport", "down", "up"),
    [
        ("fedalign", "exact", 45, 40),
        ("fedalign", "bfloat16", 22.5, 20),
        ("auto", "exact", 100, 80),  # a priority client of `auto` trains two models
        ("auto", "bfloat16", 60, 40),
    ],
)
def test_a_round_of_a_priority_client(rule, transport, down, up):
    found, records = measure(3, PARAMETERS, rule=rule, transport=transport)
    assert all(len(record.tried) == 3 if rule == "auto" else record.admitted == 2 for record in records)
    for traffic in found[1:]:
        assert 0 < traffic.down[1] <= down * MILLION
        assert 0 < traffic.up[1] <= up * MILLION
    # The record counts what crossed the wire: models that were sent, and nearly all bytes, the rest being names.
    # At the end free clients get the final model for its last figures, which belong to no round.
    sent = sum(sum(traffic.models.values()) for traffic in found)
    assert sum(record.models_down for record in records) == sent - (NODES - PRIORITY)
    assert all(record.models_up == NODES for record in records[:1])  # later, `auto` trains the priority-only model, too
    assert all(record.models_up == (NODES if rule == "fedalign" else NODES + PRIORITY) for record in records[1:])
    arrived = sum(sum(traffic.up.values()) for traffic in found)
    assert 0.98 * arrived <= sum(record.bytes_up for record in records) <= arrived
