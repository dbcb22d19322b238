"""Real processes with a hostile majority of free nodes, which lie about losses and samples and send long updates."""

from pathlib import Path

import hostile_task
import pytest
import torch
from processes import started

import fedalign as fa

pytestmark = pytest.mark.processes
HERE = Path(__file__).resolve().parent
ROUNDS = 3
SITES = [f"site-{k}" for k in range(hostile_task.CLIENTS)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the federation with a deployment's defaults; the nodes of attackers have an app of their own."""
    files = {
        "my_federation/task.py": (HERE / "hostile_task.py").read_text(),
        "my_federation/client_app.py": (HERE / "hostile_app.py").read_text(),
    }
    attackers = {SITES[k]: hostile_task.hostile_config() for k in hostile_task.HOSTILE}
    folder = tmp_path_factory.mktemp("hostile")
    with started(folder, SITES, hostile_task.PRIORITY, files, node_config=attackers) as federation:
        federation.run("verified", rule="all", trust="verify", rounds=ROUNDS, warmup=0.0, lr=hostile_task.LR)
        yield federation.finish("verified")


def test_decisions_are_the_simulations(ended):
    rounds, weights = ended
    expected = hostile_task.hostile_run(fa.Verified(), ROUNDS)
    for mine, theirs in zip(rounds, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        assert [c.weight for c in mine.clients] == pytest.approx([c.weight for c in theirs.clients])
        assert [c.priority for c in mine.clients] == [k < hostile_task.PRIORITY for k in range(hostile_task.CLIENTS)]
        for k in hostile_task.HOSTILE:
            assert mine.clients[k].loss == mine.global_loss  # as it claims
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights[key], value, atol=1e-5)


def test_the_priority_clients_are_not_worse_off(ended):
    rounds, _ = ended
    alone, believed = (
        hostile_task.hostile_run(rule, ROUNDS).history.rounds for rule in (fa.PriorityOnly(), fa.Everyone())
    )
    assert rounds[-1].test_accuracy >= alone[-1].test_accuracy - 0.01
    assert believed[-1].test_accuracy < alone[-1].test_accuracy - 0.09  # the attack is real
    assert believed[-1].attack_success > 0.9
    assert {r.clients[hostile_task.PRIORITY].decision for r in rounds} == {"admitted"}  # the honest one helps
