"""The pictures of a report: what they draw, and when there is nothing to draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import federation, linear
from PIL import Image

import fedalign as fa
from fedalign.report import autoalign_plots, client_plots, plot_style, round_plots


@pytest.fixture(scope="module")
def histories():
    specs = {
        name: [fa.RunSpec(federation(seed=seed), rule, 5, warmup=0.2, seed=seed) for seed in (0, 1)]
        for name, rule in (("fedalign", fa.Align(0.5)), ("auto", fa.AutoAlign()), ("all", fa.Everyone()))
    }
    results = fa.simulate_many([spec for own in specs.values() for spec in own], linear, device="cpu")
    names = [name for name, own in specs.items() for _ in own]
    found = {name: {} for name in specs}
    for name, result in zip(names, results, strict=True):
        found[name][len(found[name])] = result.history
    return found


def labels(figure):
    assert not any(axes.get_legend() for axes in figure.axes), "a legend may hide data"
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_heat_map_shows_who_was_admitted(histories):
    runs = histories["fedalign"]
    image = np.asarray(client_plots.admitted(runs, "title").axes[0].images[0].get_array())
    expected = np.mean(
        [[[c.decision == "admitted" for c in r.clients[2:]] for r in h.rounds] for h in runs.values()], 0
    )
    assert np.allclose(image, expected.T)
    assert image.max() > 0


def test_only_arms_that_select_have_a_heat_map(histories):
    assert client_plots.selects(histories["fedalign"])
    assert client_plots.selects(histories["auto"])
    assert not client_plots.selects(histories["all"])


def test_curves_are_means_over_seeds(histories):
    figure = round_plots.curves(histories, "test_accuracy", "title", "label", 1, percent=True)
    line = next(line for line in figure.axes[0].lines if line.get_label() == "all")
    expected = np.mean([[100 * r.test_accuracy for r in h.rounds] for h in histories["all"].values()], 0)
    assert np.allclose(line.get_ydata(), expected)
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_a_diverged_seed_is_short_and_a_missing_value_is_nan(histories):
    whole = histories["all"][0]
    short = fa.History([replace(whole[0], test_accuracy=None), whole[1]])
    table = round_plots.by_seed_and_round({0: whole, 1: short, 2: fa.History()}, "test_accuracy")
    assert table.shape == (2, 5)
    assert np.isnan(table[1]).tolist() == [True, False, True, True, True]


def test_pictures_of_candidates(histories):
    runs = histories["auto"]
    assert autoalign_plots.chosen_epsilon(runs, "ε") is not None
    assert "other candidates" in labels(autoalign_plots.candidate_losses(runs, "losses"))
    assert autoalign_plots.chosen_epsilon(histories["all"], "ε") is None
    assert autoalign_plots.candidate_losses(histories["fedalign"], "losses") is None


def test_candidates_without_an_epsilon_have_no_picture_of_it(histories):
    """The verified rule chooses clients by what they contribute, whatever ε the inner rule has."""
    runs = {
        seed: fa.History([replace(r, tried=tuple(replace(t, epsilon=None) for t in r.tried)) for r in history.rounds])
        for seed, history in histories["auto"].items()
    }
    assert autoalign_plots.chosen_epsilon(runs, "ε") is None
    assert autoalign_plots.candidate_losses(runs, "losses") is not None


def test_a_loss_of_zero_does_not_break_the_picture(histories):
    """A logarithmic axis has no place for it."""
    history = histories["auto"][0]
    perfect = fa.History(
        [replace(r, tried=tuple(replace(t, loss=0.0 if t.chosen else t.loss) for t in r.tried)) for r in history.rounds]
    )
    assert autoalign_plots.candidate_losses({0: perfect, 1: history}, "losses") is not None


def test_a_served_fallback_is_marked(histories):
    history = histories["auto"][0]
    last = next(r for r in reversed(history.rounds) if r.tried and r.fallback)
    served = replace(last, fallback=replace(last.fallback, behind=True))
    assert not any(autoalign_plots.fallback_served(r) for r in histories["all"][0].rounds)
    assert autoalign_plots.fallback_served(served)
    figure = autoalign_plots.chosen_epsilon({0: fa.History([*history.rounds[:-1], served])}, "ε")
    assert "fallback: priority-only model served" in labels(figure)


def test_incentive_counts_free_clients_only():
    def tests(*accuracies):
        return {0: [{"id": k, "priority": k == 0, "test_accuracy": a} for k, a in enumerate(accuracies)]}

    found = {"local": tests(0.5, 0.5, 0.5, None), "all": tests(0.9, 0.6, 0.4, 0.8)}
    assert labels(client_plots.incentive(found, "local", "title")) == ["all: 1 of 2 better off"]
    assert client_plots.incentive({"local": found["local"]}, "local", "title") is None


def test_class_counts_count_a_sample_once():
    fed = federation()
    image = np.asarray(client_plots.class_counts(fed, "title").axes[0].images[0].get_array())
    assert image.sum(1).tolist() == [40, 25, 60, 33, 18]


@pytest.mark.pictures
def test_a_saved_picture_is_the_same_every_time(tmp_path):
    def draw(name):
        figure, axes = plot_style.figure_of()
        axes.plot([1, 2], [3, 4], color=plot_style.colour("auto", 0))
        return [path.read_bytes() for path in plot_style.save(figure, tmp_path / name)]

    assert draw("a") == draw("b")


@pytest.mark.pictures
def test_pictures_are_made_for_papers(histories, tmp_path):
    wide = round_plots.spreads(histories, "test_accuracy", "title", "label", 1, percent=True)
    column = round_plots.curves(histories, "test_accuracy", "Test accuracy", "label", 1, percent=True)
    for name, figure, width in (("wide", wide, plot_style.TEXT), ("column", column, plot_style.COLUMN)):
        png, pdf = plot_style.save(figure, tmp_path / name)
        with Image.open(png) as picture:
            assert picture.width == round(300 * width)
            assert picture.info["dpi"][0] == pytest.approx(300, abs=0.1)
            assert picture.info["Title"] == figure.get_label()
        assert b"/Type3" not in pdf.read_bytes()


def test_arms_are_told_apart_without_colours(histories):
    figure = round_plots.curves(histories, "test_accuracy", "title", "label", 1, percent=True)
    lines = [line for line in figure.axes[0].lines if line.get_label() in histories]
    assert len({(line._dash_pattern[0], tuple(line._dash_pattern[1] or ())) for line in lines}) == len(histories)
    assert not figure.axes[0].collections  # no bands
    arms = ["priority", "all", "fedalign", "local", "fedalign-train", "auto"]
    assert len({str(plot_style.line(arm, 0)["linestyle"]) for arm in arms}) == len(arms)
    assert len({plot_style.line(arm, 0)["color"] for arm in arms}) == len(arms)


def test_spreads_are_quartiles_in_a_panel_for_each_arm(histories):
    figure = round_plots.spreads(histories, "test_accuracy", "title", "label", 1, percent=True)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(histories)
    runs = np.array([[100 * r.test_accuracy for r in h.rounds] for h in histories["fedalign"].values()])
    drawn = [np.asarray(line.get_ydata()) for line in figure.axes[0].lines]
    for part in (0.25, 0.5, 0.75):
        expected = np.quantile(runs, part, axis=0)
        assert any(values.shape == expected.shape and np.allclose(values, expected) for values in drawn)
    single = {arm: {0: runs[0]} for arm, runs in histories.items()}
    assert round_plots.spreads(single, "test_accuracy", "title", "label", 1) is None


def test_pictures_leave_the_plots_of_a_notebook_alone():
    plt = pytest.importorskip("matplotlib.pyplot")
    backend = plt.get_backend()
    figure, _ = plot_style.figure_of("a picture")
    assert figure.get_label() == "a picture"
    assert plt.get_fignums() == []
    assert plt.get_backend() == backend
