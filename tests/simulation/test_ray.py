"""Runs spread over Ray's workers are the local runs, file by file."""

import os
import sys

import pytest
import torch

import fedalign as fa
from fedalign.cli import main
from fedalign.simulation.api import RunSpec, Simulation
from fedalign.simulation.ray_workers import RaySimulation

SETTINGS = ["run", "synth-medium", "--rounds", "4", "--seeds", "2", "--set", "data.samples=40", "--quiet"]
# Ray leaves files and sockets to the garbage collector when it shuts down.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.parametrize("arms", ["priority,all,local,fedalign,auto", "priority,auto"])
def test_results_are_those_of_a_local_run(tmp_path, arms):
    here, there = tmp_path / "here", tmp_path / "ray"
    assert main([*SETTINGS, "--arms", arms, "--out", str(here)]) == 0
    assert main([*SETTINGS, "--arms", arms, "--out", str(there), "--on", "ray", "--workers", "2"]) == 0
    files = [p.relative_to(here) for p in here.rglob("*") if p.name in ("rounds.jsonl", "model.safetensors")]
    assert len(files) == 2 * len(arms.split(",")) * 2
    for file in files:
        assert (here / file).read_bytes() == (there / file).read_bytes(), file


def test_metrics_and_early_stopping_work_beside_the_simulation(tmp_path):
    stop = "early-stopping(metric='test_accuracy', patience=1)"
    more = ["--arms", "priority,all", "--rounds", "12", "--set", 'metrics=["f1"]', "--track", "tensorboard"]
    more += ["--set", f'callbacks=["{stop}", "best-round"]']
    here, there = tmp_path / "here", tmp_path / "ray"
    assert main([*SETTINGS, *more, "--out", str(here)]) == 0
    assert main([*SETTINGS, *more, "--out", str(there), "--on", "ray", "--workers", "2"]) == 0
    stopped = [p.relative_to(here) for p in here.rglob("stopped.json")]
    assert stopped
    for file in [*stopped, *(p.relative_to(here) for p in here.rglob("rounds.jsonl"))]:
        assert (here / file).read_bytes() == (there / file).read_bytes(), file
        assert (there / file).with_name("best.safetensors").exists()


def test_divergence_is_reported_from_afar(tmp_path):
    out = tmp_path / "out"
    wild = ["--set", "local.lr=1e38", "--on", "ray", "--workers", "1", "--arms", "priority,all", "--out", str(out)]
    assert main([*SETTINGS, *wild]) == 3


def test_a_worker_that_fails_is_one_sentence():
    fed = fa.Federation.from_arrays([(torch.randn(9, 3), torch.arange(9) % 2)] * 2, priority=[True, False])
    here = os.getpid()

    def make():
        if os.getpid() != here:
            raise RuntimeError("the worker lacks something")
        return torch.nn.Linear(3, 2)

    simulation = RaySimulation([RunSpec(fed, fa.Everyone(), rounds=2, warmup=0)], make, workers=1)
    with pytest.raises(fa.FedalignError, match=r"a Ray worker failed \(.*lacks something.*--resume"):
        list(simulation.rounds())


def test_from_python():
    fed = fa.Federation.from_arrays([(torch.randn(9, 3), torch.arange(9) % 2)] * 2, priority=[True, False])
    specs = [RunSpec(fed, fa.Everyone(), rounds=2, warmup=0, seed=seed) for seed in range(3)]
    there = RaySimulation(specs, lambda: torch.nn.Linear(3, 2), device="cpu", workers=2)
    events = [event for events in there.rounds() for event in events]
    assert sorted(index for index, _ in events) == [0, 0, 1, 1, 2, 2]
    here = Simulation(specs, lambda: torch.nn.Linear(3, 2), device="cpu").run()
    for a, b in zip(there.results(), here, strict=True):
        assert torch.equal(a.model.weight, b.model.weight)


def test_bad_input(monkeypatch, capsys):
    assert main(["run", "synth-medium", "--workers", "2"]) == 2
    assert "--workers needs --on ray" in capsys.readouterr().err
    assert main(["run", "synth-medium", "--on", "ray", "--workers", "0"]) == 2
    assert "workers must be at least 1" in capsys.readouterr().err
    assert main(["run", "synth-medium", "--on", "ray", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "synth-medium", "--on", "ray"]) == 2
    assert "pip install 'fedalign[ray]'" in capsys.readouterr().err


def test_a_users_own_rule_and_model_travel_to_the_workers(tmp_path):
    (tmp_path / "beside_ray.py").write_text(
        "import fedalign as fa, torch\n"
        "class Own(fa.Align):\n    pass\n"
        "def net(inputs: int):\n    return torch.nn.Linear(inputs, 10)\n"
    )
    (tmp_path / "own.toml").write_text(
        'rounds = 2\nseeds = 1\narms = ["own"]\n[arm.own]\nrule = "beside_ray:Own"\n[data]\nkind = "synth"\n'
        'samples = 40\n[model]\nkind = "beside_ray:net"\ninputs = 60\n[local]\nlr = 0.1\nepochs = 1\n'
    )
    here, there = tmp_path / "here", tmp_path / "there"
    assert main(["run", str(tmp_path / "own.toml"), "--quiet", "--device", "cpu", "--out", str(here)]) == 0
    assert (
        main(["run", str(tmp_path / "own.toml"), "--quiet", "--on", "ray", "--workers", "1", "--out", str(there)]) == 0
    )
    log = "own/seed-0/rounds.jsonl"
    assert (here / log).read_bytes() == (there / log).read_bytes()
