"""Real processes: nodes that hang in training or before they have said hello, a second server, another model."""

import re
from pathlib import Path

import pytest
from processes import LONG, started

from fedalign.flower.audit import read

pytestmark = pytest.mark.processes
SITES = [f"site-{k}" for k in range(4)]  # 0 is a priority client, 1 an honest free one, 2 and 3 hang
TASK = '''
"""Four clients of one task."""
import torch
from fedalign.data.synth import Synth
from fedalign.flower import ClientData

def model():
    return torch.nn.Linear(60, 10)

def data(node_config):
    federation = Synth(priority=1, free=3, samples=60, test_samples=60).federation(seed=0)
    pool, client = federation.pool, federation.clients[int(node_config["partition-id"])]
    return ClientData(**{s: (pool.x[client.rows(s)], pool.y[client.rows(s)]) for s in ("train", "heldout", "test")})
'''


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    app = (Path(__file__).resolve().parent / "hanging_app.py").read_text()
    files = {"my_federation/task.py": TASK, "my_federation/client_app.py": app}
    hangs = {"site-2": {"data-hangs": "train"}, "site-3": {"data-hangs": "query.hello"}}
    with started(tmp_path_factory.mktemp("slow"), SITES, 1, files, node_config=hangs) as federation:
        yield federation


def failed_run(running, name, **settings):
    """Submit a run that must fail, and return what its server said."""
    run = running.run(name, **settings)

    def said():
        return running.flwr("log", run, "here", "--show").stdout

    running.wait_for(lambda: "FedalignError" in said(), what="the end of the run")
    return " ".join(said().split())


@pytest.fixture(scope="module")
def ended(running):
    """A run of six rounds, and a second server that was started on its folder meanwhile."""
    slow = {"rule": "all", "warmup": 0.0, "rounds": 6, "free-part": 0.5, "grace": 5.0}  # the default
    running.run("slow", **slow)
    running.wait_for(lambda: len(running.history("slow")) >= 1, what="round 1")
    second = failed_run(running, "slow", resume=str(running.folder / "slow"), **slow)
    return running.finish("slow")[0], second


def test_hanging_nodes_do_not_double_a_round(running, ended):
    rounds, _ = ended
    assert [r.clients[0].decision for r in rounds] == ["trained"] * 6
    assert {(r.clients[3].decision, r.clients[3].reason) for r in rounds} == {
        ("absent", "it has not said yet how many samples it has")
    }
    hanging = [r.clients[2] for r in rounds]
    assert [c.decision for c in hanging[:4]] == ["lost", "lost", "absent", "absent"]
    assert hanging[0].reason.endswith("when the round went on without it")
    assert hanging[2].reason.startswith("benched for 2 more rounds")
    log = (running.folder / "slow" / "server.log").read_text()
    seconds = [float(s) for s in re.findall(r"; ([0-9.]+) s \(waiting", log)]
    honest = max(s for s, c in zip(seconds, hanging, strict=True) if c.decision == "absent")
    assert seconds[0] < 2 * honest  # in the first round the server waited for it; in the second it was still busy
    assert honest < LONG / 2
    (event,) = (e for e in read(running.folder / "slow") if e["event"] == "client_benched" and e["round"] == 2)
    assert event["client"] == "site-2"


def test_a_second_server_does_not_touch_the_folder(ended):
    rounds, second = ended
    assert "is being written by process" in second
    assert [r.round for r in rounds] == list(range(6))


def test_a_resume_with_another_model_says_so(running, ended):
    task = running.app / "my_federation" / "task.py"
    task.write_text(TASK.replace("Linear(60, 10)", "Linear(60, 12)"))
    said = failed_run(running, "slow", rule="all", warmup=0.0, rounds=7, resume=str(running.folder / "slow"))
    assert "was run with another model: weight was float32 10×60, is float32 12×60" in said
    assert len(running.history("slow")) == 6
