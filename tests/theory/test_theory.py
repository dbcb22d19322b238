"""The theory: bounds against exact expected errors, the paper's algebra, and what a run says of it."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import fedalign as fa
from fedalign.cli import main
from fedalign.data.convex import Multinomial, Quadratic
from fedalign.experiments.config import load
from fedalign.protocol.roster import Roster
from fedalign.theory import Constants, LeastSquares, Problem, Softmax, bounds, constants, expected, path_of
from fedalign.theory.advise import advise
from fedalign.theory.setting import setting_of
from fedalign.training.participation import Replacement

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw, spreads=(0.0, 0.1, 1.0, 4.0)):
    """Random strongly convex federations of least squares, with a path of inclusions."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    priority, free, d = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    centre, spread, l2 = rng.normal(size=d), draw(st.sampled_from(spreads)), draw(st.sampled_from([0.0, 0.3]))
    objectives = []
    for _ in range(priority + free):
        x = rng.normal(size=(draw(st.integers(d + 3, 12)), d))
        y = x @ (centre + spread * rng.normal(size=d)) + draw(st.sampled_from([0.0, 0.5])) * rng.normal(size=len(x))
        objectives.append(LeastSquares(x, y, l2))
    sizes = rng.integers(1, 20, size=priority + free).astype(float)
    is_priority = np.arange(priority + free) < priority
    problem = Problem(objectives, is_priority, sizes / sizes[is_priority].sum())
    rounds = draw(st.integers(1, 25))
    included = rng.random((rounds, priority + free)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    start = problem.minimiser + draw(st.sampled_from([0.0, 0.1, 5.0])) * rng.normal(size=d)
    return problem, included & ~is_priority, start


def path(problem, included, gaps):
    factors = 1 / (1 + included @ problem.p)
    return factors, (included * np.array(gaps)) @ problem.p * factors


@quick
@given(problems(), st.integers(1, 5), st.sampled_from([None, 1, 2, 3]))
def test_the_bound_is_never_below_the_exact_expected_error(made, E, batch):
    problem, included, start = made
    rate = constants(problem, start, E, batch).rate
    exact = expected(problem, included, start, E, rate, batch)
    c = constants(problem, start, E, batch, moments=(exact.sigma2, exact.G2))
    b = bounds(c, *path(problem, included, c.gaps))
    tiny = 1e-9 * b.corrected.max() + 1e-12  # rounding
    assert (b.recursion + tiny >= exact.errors).all()
    assert (b.corrected + tiny >= b.recursion).all()


@quick
@given(problems(), st.integers(1, 5), st.integers(0, 10**6))
def test_theta_and_rho_are_in_their_range_and_monotone(made, E, seed):
    problem, included, start = made
    c = constants(problem, start, E)
    b = bounds(c, *path(problem, included, c.gaps))
    assert (b.theta >= 0).all()
    assert (b.theta <= 1).all()
    assert (b.rho >= 0).all()
    # A larger ε, on the same path, includes a superset: θ is not larger, at any T.
    more = (included | (np.random.default_rng(seed).random(included.shape) < 0.5)) & ~problem.priority
    assert (bounds(c, *path(problem, more, c.gaps)).theta <= b.theta + 1e-12).all()
    assert c.heterogeneity >= 0
    assert min(c.gaps) >= 0


@quick
@given(problems(), st.integers(1, 5))
def test_without_free_clients_it_is_fedavgs_bound(made, E):
    problem, included, start = made
    c = constants(problem, start, E)
    b = bounds(c, *path(problem, np.zeros_like(included), c.gaps))
    assert not b.rho.any()
    T = b.T
    assert b.theta == pytest.approx(T / (T + c.gamma - 2))  # the paper says 1; it is below, and tends to it
    # Li et al. 2020, Theorem 1, which counts steps from 1: κ/(γ + T)·(2B/μ + μγ/2·‖w₀ − w*‖²).
    B = c.sigma2 + 6 * c.L * c.heterogeneity + 8 * (E - 1) ** 2 * c.G2
    theirs = c.L / c.mu / (c.gamma + T) * (2 * B / c.mu + c.mu * c.gamma / 2 * c.distance)
    missing = c.c2 * c.heterogeneity * (1 - b.theta) / (T + c.gamma)
    assert b.corrected + missing == pytest.approx(theirs)


@quick
@given(problems(spreads=(0.0,)))
def test_identical_clients_have_no_heterogeneity(made):
    problem, _, start = made
    same = Problem([problem.objectives[0]] * len(problem.objectives), problem.priority, problem.p)
    c = constants(same, start, 2)
    assert c.heterogeneity == pytest.approx(0, abs=1e-10)
    assert c.gaps == pytest.approx([0] * len(c.gaps), abs=1e-10)


@quick
@given(problems(), st.integers(1, 3))
def test_the_one_step_lemma_in_closed_form(made, E):
    """Δ_T ≤ [(γ−1)(γ−2)Δ₀ + 4/μ²·Σ B_i(i+γ−1)/(i+γ) + 2/μ·Σ (i+γ−1)D_i] / ((T+γ−1)(T+γ−2)): docs/theory.md."""
    problem, included, start = made
    c = constants(problem, start, E)
    factors, biases = path(problem, included, c.gaps)
    b = bounds(c, factors, biases)
    i, g = np.arange(E * len(factors)), c.gamma
    B = c.noise + 6 * c.L * c.heterogeneity * np.repeat(factors, E)
    D = 2 * np.repeat(biases, E)
    total = (g - 1) * (g - 2) * c.distance
    total += 4 / c.mu**2 * (B * (i + g - 1) / (i + g)).sum() + 2 / c.mu * ((i + g - 1) * D).sum()
    T = len(i)
    assert b.recursion[-1] == pytest.approx(c.L / 2 * total / ((T + g - 1) * (T + g - 2)))


# The paper's algebra, step by step.


def quadratic(centre, curvature=1.0):
    """F(w) = curvature/2·(w − centre)², as least squares."""
    x = np.full((2, 1), math.sqrt(curvature / 2))
    return LeastSquares(x, (x * centre)[:, 0])


def test_as_printed_the_first_steps_bias_is_in_no_term():
    problem = Problem([quadratic(0.0), quadratic(10.0)], np.array([True, False]), np.array([1.0, 1.0]))
    start = np.zeros(1)  # w*, so nothing but the free client moves it
    exact = expected(problem, np.array([[False, True]]), start, 1, constants(problem, start, 1).rate)
    c = constants(problem, start, 1, moments=(exact.sigma2, exact.G2))
    b = bounds(c, *path(problem, np.array([[False, True]]), c.gaps))
    assert exact.errors[1] > 0.3
    assert b.printed[1] < exact.errors[1] < b.corrected[1]  # as printed, the sums begin at i = 1


def test_as_printed_a_large_number_of_local_steps_makes_the_start_too_cheap():
    problem = Problem([quadratic(0.0)], np.array([True]), np.array([1.0]))
    start = np.full(1, 10.0)
    c = constants(problem, start, 100, moments=(0.0, 0.0))
    b = bounds(c, np.ones(1), np.zeros(1))
    assert c.gamma == 100 > 8 * c.L / c.mu
    assert b.printed[0] < problem.value(start) - c.minimum <= b.corrected[0]


def test_the_drift_lemmas_inequality_needs_the_weights_on_both_sides():
    a, weights = np.array([1.0, 0.0, 0.0]), np.array([0.98, 0.01, 0.01])
    mean = weights @ a
    assert np.square(a - mean).sum() > np.square(a).sum()  # as the paper prints it, it fails
    assert weights @ np.square(a - mean) <= weights @ np.square(a)  # weighted, as it is used, it does


def test_the_aggregate_is_not_farther_from_the_optimum_than_its_models_on_average():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = rng.integers(2, 6)
        models, best = rng.normal(size=(n, 3)), rng.normal(size=3)
        inside = rng.random(n) < 0.7
        inside[0] = True
        shares = rng.random(n) * inside
        shares /= shares.sum()
        assert np.square(shares @ models - best).sum() <= shares @ np.square(models - best).sum(1) + 1e-12


def test_the_last_line_of_the_induction_lost_a_factor():
    """L/2·v_T/(T+γ) is (C₁ + C₂θΓ)/(T+γ) + ρ_T, with the fraction that the proof's last line leaves out."""
    c = Constants(2.0, 0.5, 3, 0.2, (0.0, 0.7), 1.0, 2.0, 4.0, 0.0)
    factors, biases = np.array([0.5, 0.8]), np.array([0.3, 0.1])
    b = bounds(c, factors, biases)
    T, g = b.T[-1], c.gamma
    B = (c.noise * (T + g - 2) + 6 * c.L * c.heterogeneity * 3 * factors.sum()) / (T + g - 2)
    D = 2 * 3 * biases.sum() / (T + g - 2)
    v = 4 / c.mu**2 * B + 2 / c.mu * D * (T + g) + g * c.distance
    assert b.corrected[-1] == pytest.approx(c.L / 2 * v / (T + g))


@pytest.mark.parametrize("draws", [1, 3])
def test_theorem_2s_multiset_is_unbiased_and_within_its_variance(draws):
    rng = np.random.default_rng(1)
    samples, priority = (10, 30, 60, 40), (True, True, True, False)
    roster = Roster(tuple("abcd"), priority, samples)
    models, origin = rng.normal(size=(4, 3)), np.zeros(3)
    p = np.asarray(roster.p)
    factor = 1 / (1 + p[3])
    mean = factor * (p[:3] @ models[:3] + p[3] * models[3])
    found = []
    for round in range(10_000):
        counts = Replacement(draws).draw(round, roster, seed=0).draws
        drawn = sum(n / draws * models[k] for k, n in counts.items())
        found.append(factor * (drawn + p[3] * models[3]))
    found = np.array(found)
    spread = np.square(found - mean).sum(1)
    # Lemma 5's bound with E·η·G for the models' distance from where the round began, without its factor 4.
    largest = np.square(models[:3] - origin).sum(1).max()
    assert spread.mean() <= largest / draws
    assert np.abs(found.mean(0) - mean).max() <= 5 * math.sqrt(spread.mean() / len(found))
    # Without replacement, with p_k as weights and no correction, it would be biased.
    assert np.abs(p[:3] @ models[:3] - models[:3].mean(0)).max() > 0.05


# Solvers and runs.


def test_minimisers_and_derivatives_of_logistic_regression():
    rng = np.random.default_rng(0)
    o = Softmax(rng.normal(size=(30, 4)), rng.integers(0, 3, 30).astype(float), 0.1, 3)
    w = rng.normal(size=o.size)
    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(w.reshape(3, 4)))
    loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(o.x)), torch.from_numpy(o.y).long())
    total = loss + 0.05 * model.weight.square().sum()
    total.backward()
    assert o.value(w) == pytest.approx(total.item())
    assert o.gradient(w) == pytest.approx(model.weight.grad.numpy().reshape(-1))
    assert o.sample_gradients(w).mean(0) == pytest.approx(o.gradient(w))
    step = 1e-6 * rng.normal(size=o.size)
    assert o.gradient(w + step) - o.gradient(w - step) == pytest.approx(2 * o.hessian(w) @ step, abs=1e-12)
    assert np.abs(o.gradient(o.minimiser)).max() < 1e-9
    low, high = o.curvature()
    values = np.linalg.eigvalsh(o.hessian(w))
    assert low <= values[0] + 1e-12
    assert values[-1] <= high


def test_quadratic_data_have_the_curvature_they_say():
    federation = Quadratic(mu=0.3, L=1.7, dimensions=4).federation(0)
    for client in federation.clients:
        x = federation.pool.x[client.train].numpy()
        values = np.linalg.eigvalsh(2 * x.T @ x / len(x))
        assert values[[0, -1]] == pytest.approx([0.3, 1.7])
    assert Multinomial().federation(1) is Multinomial().federation(2)


def test_fresh_batches_are_drawn_anew():
    rows = np.arange(12)
    x = np.eye(12, dtype=np.float64)
    y = np.zeros((12, 1))
    federation = fa.Federation.from_arrays([(x, y), (x, y)], priority=[True, False], heldout_fraction=0)
    local = fa.LocalSGD(lr=1.0, steps=400, batch_size=3, fresh=True)
    from fedalign.simulation.engine.batches import batches_for
    from fedalign.simulation.engine.jobs import Data, TrainJob

    data = Data([federation.pool], torch.device("cpu"), torch.float64)
    job = TrainJob(torch.zeros(12), federation.pool, federation.clients[0].train, local, 0, 0, 1, 0)
    drawn = batches_for([job], data).rows[0].numpy()
    assert drawn.shape == (400, 3)
    assert all(len(set(batch)) == 3 for batch in drawn.tolist())
    counts = np.bincount(drawn.reshape(-1), minlength=12)
    assert len(counts) == len(rows)
    assert abs(counts - 100).max() < 40
    repeated = sum(bool(set(a) & set(b)) for a, b in itertools.pairwise(drawn))
    assert 150 < repeated < 260  # 1 − C(9,3)/C(12,3) = 0.62 of 399; in passes it would be far fewer
    with pytest.raises(fa.FedalignError, match="fresh"):
        fa.LocalSGD(lr=1.0, epochs=1, fresh=True)


@pytest.mark.pictures
def test_a_run_with_full_batches_is_the_exact_error_and_its_history_has_theta_and_rho(tmp_path):
    command = ["run", "theory-quadratic", "--rounds", "30", "--seeds", "2", "--quiet", "--out", str(tmp_path / "a")]
    assert main([*command, "--set", "local.batch_size=40", "--set", "local.fresh=false"]) == 0
    theory = json.loads((tmp_path / "a" / "summary.json").read_text())["theory"]
    experiment = load(str(tmp_path / "a" / "config.toml"))
    federation = experiment.federation(0)
    setting = setting_of(experiment.settings, federation, experiment.local("e0"))
    c = setting.constants(np.zeros(5))
    for arm, figures in theory["arms"].items():
        assert figures["exact"] == pytest.approx(figures["error"], rel=1e-6)
        assert figures["constants"]["sigma2"] == 0
        assert figures["smallest_ratio"] > 1
        lines = (tmp_path / "a" / arm / "seed-0" / "rounds.jsonl").read_text().splitlines()
        rounds = [json.loads(line) for line in lines]
        factors = [r["inclusion"] for r in rounds]
        assert [r["theta"] for r in rounds] == pytest.approx(np.cumsum(factors) / np.arange(1, 31))
        history = fa.History([fa.RoundRecord.from_json(line) for line in lines])
        b = bounds(c, *path_of(history, c.gaps))
        assert [r["rho"] for r in rounds] == pytest.approx(b.rho[1:].tolist())
        assert rounds[-1]["objective"] - c.minimum == pytest.approx(figures["error"], abs=1e-12)
    assert theory["arms"]["e0"]["rho"] == 0
    thetas = [theory["arms"][arm]["theta"] for arm in ("e0", "e0.1", "e0.3", "e1", "einf")]
    assert thetas == sorted(thetas, reverse=True)
    for name in ("theory.png", "theta.png", "rho.png"):
        assert (tmp_path / "a" / name).stat().st_size > 10_000


def test_clients_alone_have_no_theory(tmp_path):
    command = ["run", "theory-quadratic", "--arms", "e0,local", "--rounds", "3", "--seeds", "1", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "a")]) == 0
    theory = json.loads((tmp_path / "a" / "summary.json").read_text())["theory"]["arms"]
    assert "fails" in theory["local"]


@pytest.mark.slow
def test_logistic_regression_with_a_bias(tmp_path):
    local = '{lr={schedule="theory"}, steps=2, batch_size=20, fresh=true, weight_decay=0.1}'
    settings = ["--set", "theory=true", "--set", f"local={local}", "--set", "data.samples=60"]
    command = ["run", "synth-low", "--arms", "priority,fedalign,auto", "--rounds", "3", "--seeds", "1", "--quiet"]
    assert main([*command, *settings, "--out", str(tmp_path / "a")]) == 0
    for arm in ("priority", "fedalign"):
        folder = tmp_path / "a" / arm / "seed-0"
        last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
        weights = load_file(folder / "model.safetensors").values()
        penalty = 0.05 * sum(float(w.double().square().sum()) for w in weights)
        assert last["objective"] == pytest.approx(last["train_loss"] + penalty, rel=1e-5)
    theory = json.loads((tmp_path / "a" / "summary.json").read_text())["theory"]["arms"]
    assert theory["fedalign"]["smallest_ratio"] > 1
    assert "before clients train" in theory["auto"]["fails"]
    lines = (tmp_path / "a" / "auto" / "seed-0" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])  # it goes on from another model than the one whose weights the record has
    assert last["base"]
    assert last["rho"] is None
    assert last["objective"] > 0


def test_a_resumed_run_has_the_same_theta_and_rho(tmp_path, monkeypatch):
    settings = ["run", "theory-quadratic", "--rounds", "6", "--seeds", "1", "--quiet"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--set", "local.lr=0.05"], "the learning rate is not that of the theorems"),
        (["--set", 'local.lr={schedule="inverse-time", mu=0.5, gamma=16.0}'], "γ = 32"),
        (["--set", "local.lr=0.05", "--set", "local.momentum=0.5"], "plain SGD"),
        (["--set", "local.lr=0.05", "--set", "local.fresh=false"], "Assumption 3"),
        (["--set", 'model={kind="mlp", inputs=5, hidden=[3], classes=1}', "--set", "local.lr=0.05"], "Assumption 2"),
        (["--set", 'participation={kind="uniform", fraction=0.5}', "--set", "local.lr=0.05"], "Theorem 2"),
    ],
)
def test_a_failing_assumption_is_named_and_no_bound_printed(tmp_path, capsys, change, said):
    command = ["run", "theory-quadratic", "--rounds", "2", "--seeds", "1", "--out", str(tmp_path / "a"), *change]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"No bound: {said}" in out or ("No bound:" in out and said in out)
    assert "printed" not in out
    theory = json.loads((tmp_path / "a" / "summary.json").read_text())["theory"]
    assert list(theory) == ["fails"]


def test_advice_is_the_best_cut_of_the_bound(capsys):
    experiment = load("theory-quadratic")
    setting = setting_of(experiment.settings, experiment.federation(0), experiment.local("e0"))
    c = setting.constants(np.zeros(5))
    losses = np.array([o.value(setting.problem.minimiser) for o in setting.problem.objectives])
    advice = advise(setting.problem, c, losses, 50)
    assert advice.bounds["advice"] <= min(advice.bounds["ε = 0"], advice.bounds["ε = ∞"])
    assert [piece.epsilon for piece in advice.pieces] == sorted((p.epsilon for p in advice.pieces), reverse=True)
    assert main(["theory", "advise", "theory-quadratic", "--rounds", "12"]) == 0
    out = capsys.readouterr().out
    assert "AutoALIGN" in out
    assert 'schedule = "piecewise"' in out


@pytest.mark.parametrize(("name", "said"), [("cifar10", "not convex"), ("synth-low", "weight_decay is 0")])
def test_advice_names_the_assumption_that_fails(name, said, capsys):
    assert main(["theory", "advise", name]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
