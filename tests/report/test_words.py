"""The summary in words says what the figures say, and names of runs say what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import federation, linear

import fedalign as fa
from fedalign.experiments.summary import summarise
from fedalign.report import words
from fedalign.report.differences import differing, labels
from fedalign.report.figures import Shown
from fedalign.report.measures import SENT_LOSS, TEST_ACCURACY, headline
from fedalign.report.read_runs import RunFolder


@pytest.fixture(scope="module")
def history():
    return fa.simulate(federation(), linear, fa.Align(0.5), 3, device="cpu").history


def run_of(history, figures, *, alone=(), diverged=None, **values):
    """Make a run whose arms end with the given accuracies, one for each seed."""
    histories = {
        arm: {
            seed: fa.History([replace(r, test_accuracy=accuracy, **values) for r in history.rounds])
            for seed, accuracy in enumerate(accuracies)
        }
        for arm, accuracies in figures.items()
    }
    summary = {"arms": summarise(histories, diverged or {}, set(alone)), "seeds": [0, 1, 2]}
    settings = {"name": "made-up", "description": "", "rounds": 3, "warmup": 0}
    return RunFolder(Path("made-up"), settings, summary, histories, {})


def test_a_lead_above_the_spread(history):
    found = words.summary_words(run_of(history, {"priority": (0.7, 0.8, 0.9), "auto": (0.75, 0.84, 0.96)}))
    assert found[0] == (
        "auto has the best shared model: 85.0 % test accuracy for the priority clients "
        "(mean of the last 10 rounds and of 3 seeds)."
    )
    assert found[1].startswith("auto is 5.0 points above priority (80.0 %), and better in 3 of 3 seeds.")
    assert "varies by ± 1.0 points: the lead is more than the spread over seeds" in found[1]


def test_a_lead_below_the_spread(history):
    found = words.summary_words(run_of(history, {"priority": (0.7, 0.8, 0.9), "auto": (0.65, 0.85, 0.93)}))
    assert "auto is 1.0 points above priority" in found[1]
    assert "do not settle which is better" in found[1]
    found = words.summary_words(run_of(history, {"priority": (0.7, 0.8, 0.9), "auto": (0.701, 0.801, 0.95)}))
    assert "although it is there in every seed" in found[1]


def test_equal_arms_one_seed_and_the_baseline_ahead(history):
    same = words.summary_words(run_of(history, {"fedalign": (0.7, 0.8), "priority": (0.7, 0.8), "all": (0.5, 0.5)}))
    assert same[1] == "priority has the same figures in every seed."
    single = words.summary_words(run_of(history, {"priority": (0.7,), "auto": (0.9,)}))
    assert "run more with --seeds" in single[1]
    ahead = words.summary_words(run_of(history, {"priority": (0.9, 0.8), "all": (0.5, 0.5), "mine": (0.5, 0.5)}))
    assert "priority has the best shared model" in ahead[0]
    assert "all and mine have the same figures in every seed." in ahead


def test_local_training_is_not_ranked_and_failures_are_told(history):
    run = run_of(
        history,
        {"priority": (0.7, 0.8), "local": (0.9, 0.9)},
        alone=["local"],
        diverged={"priority": {1: "it blew up"}},
    )
    found = words.summary_words(run)
    assert found[0].startswith("priority: 70.0 % test accuracy")
    assert any("20.0 points better than the best shared model. It is not ranked." in text for text in found)
    assert found[-1] == "priority, seed 1 ended early and is left out of the figures: it blew up"


def test_without_test_data_held_out_figures_count(history):
    run = run_of(history, {"priority": (None, None), "auto": (None, None)}, test_loss=None)
    assert headline(run.histories).key == "global_accuracy"
    found = words.summary_words(run)
    assert "held-out accuracy of the model sent out" in found[0]
    assert found[-1] == Shown("heldout").advice
    regression = run_of(history, {"auto": (None,)}, test_loss=None, global_accuracy=None)
    assert headline(regression.histories) == SENT_LOSS
    empty = run_of(history, {"auto": (None,)}, test_loss=None, global_accuracy=None, global_loss=None, train_loss=None)
    assert words.summary_words(empty) == ["No round has a figure to compare yet."]


def test_comparisons_need_common_seeds():
    assert words.compare({0: 1.0}, {1: 1.0}, TEST_ACCURACY) is None
    assert words.compare({0: 0.5}, {0: 0.5}, TEST_ACCURACY).equal


def test_runs_are_named_by_what_differs():
    first = {"name": "a", "arms": ["auto"], "local": {"lr": 0.1, "mu": 0.0}, "epsilon": 0.2}
    second = {"name": "a", "arms": ["all"], "local": {"lr": 0.2, "mu": 0.0}, "epsilon": 0.2}
    assert labels([first, second], ["x/1", "x/2"]) == ["lr=0.1", "lr=0.2"]
    assert differing([first, second]) == {"arms": ["auto", "all"], "local.lr": ["0.1", "0.2"]}
    assert labels([first, first], ["x/1", "x/2"]) == ["1", "2"]
    assert labels([first, first], ["x/1", "y/1"]) == ["1 (1)", "1 (2)"]
    assert labels([first, {**second, "name": "b"}], ["x/1", "x/2"]) == ["a", "b"]
    assert labels([first], ["x/1"]) == ["a"]


def test_the_best_of_several_runs(history):
    low = run_of(history, {"priority": (0.7, 0.8), "local": (0.99, 0.99)}, alone=["local"])
    high = run_of(history, {"priority": (0.8, 0.8), "auto": (0.9, 0.9)})
    (said,) = words.across_words([low, high], ["lr=0.1", "lr=0.2"])
    assert said.startswith("Of all runs, the best shared model is that of auto with lr=0.2: 90.0 % test accuracy.")
    untested = run_of(history, {"auto": (None,)}, test_loss=None)
    assert words.across_words([low, untested], ["a", "b"]) == words.across_words([low], ["a"]) == []
