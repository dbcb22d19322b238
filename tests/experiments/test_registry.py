"""The registry: names and references, both notations, options checked against signatures, users' own modules."""

from __future__ import annotations

import functools
import pickle
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from conftest import federation, flat

import fedalign as fa
from fedalign import registry
from fedalign.data.catalogue import DATASETS
from fedalign.settings import user_modules
from fedalign.settings.lookup import Registry
from fedalign.settings.notation import parse
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import check_options, options_of
from fedalign.training.models import logistic


@pytest.fixture(autouse=True)
def _forget_users_modules(monkeypatch):
    """Leave no module and no folder behind for the next test."""
    modules, path = dict(sys.modules), list(sys.path)
    monkeypatch.setattr(user_modules, "_loaded", {})
    monkeypatch.setattr(user_modules, "_appended", set())
    yield
    for name in set(sys.modules) - set(modules):
        if name.split(".")[0] in ("mine", "ours", "helper"):
            del sys.modules[name]
    sys.path[:] = path


def write(folder, text, name="mine.py"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))
    return folder


HALF = """
from dataclasses import dataclass
import fedalign as fa

@dataclass(frozen=True)
class Half(fa.Align):
    share: float = 0.5

def make(share: float = 0.25):
    return Half(share=share)

def wrong():
    return 3

class Other:
    pass

number = 3
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean", ("mean", {})),
        ("mean()", ("mean", {})),
        (" trimmed-mean( trim = 0.2 ) ", ("trimmed-mean", {"trim": 0.2})),
        ("mine:Half(share=0.3, words=['a', 'b'])", ("mine:Half", {"share": 0.3, "words": ["a", "b"]})),
        ("x(a=-1, b=true, c=False, d=inf, e=-inf, f='a)b')", None),
    ],
)
def test_the_text_notation(text, expected):
    if expected is None:
        infinity = float("inf")
        expected = ("x", {"a": -1, "b": True, "c": False, "d": infinity, "e": -infinity, "f": "a)b"})
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "a(",
        "a)",
        "a(1)",
        "a(b=)",
        "a(b=c)",
        "a(b=__import__('os'))",
        "a(**{})",
        "a(b=1, b=2)",
        "a(b=1)(c=2)",
    ],
)
def test_a_text_that_is_no_name_with_options(text):
    with pytest.raises(fa.FedalignError, match=r"is neither a name nor|cannot read the options"):
        parse(text)


@dataclass(frozen=True)
class Sample:
    size: int
    rate: float = 0.1
    widths: tuple[int, ...] = (3, 4)
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Literal["a", "b", "c"] = "a"
    limit: float | None = 1.0
    path: Path | None = None
    rule: fa.Rule | None = None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("size", "5", "s.size must be a whole number, not '5'"),
        ("size", 1.0, "s.size must be a whole number, not 1.0"),
        ("size", True, "s.size must be a whole number, not True"),
        ("size", False, "s.size must be a whole number, not False"),
        ("rate", "0.1", "s.rate must be a number, not '0.1'"),
        ("rate", True, "s.rate must be a number, not True"),
        ("widths", "12", "s.widths must be a list, not '12'"),
        ("widths", [1, 2.5], "an entry of s.widths must be a whole number, not 2.5"),
        ("betas", [0.9], r"s.betas must be a list of 2, not \[0.9\]"),
        ("mode", "d", "s.mode must be 'a', 'b' or 'c', not 'd'"),
        ("limit", True, "s.limit must be a number, not True"),
        ("sise", 1, "unknown key s.sise; did you mean 'size'?"),
        ("rule", "all", "unknown key s.rule"),  # no settings file can hold a rule here
    ],
)
def test_options_of_the_wrong_type(key, value, message):
    with pytest.raises(fa.FedalignError, match=message):
        check_options("s", {"size": 1} | {key: value}, Sample)


def test_options_are_checked_and_filled_in():
    filled = check_options("s", {"rate": 1, "size": 2, "limit": False}, Sample)
    assert filled == {"size": 2, "rate": 1.0, "widths": [3, 4], "betas": [0.9, 0.99], "mode": "a", "limit": False}
    assert type(filled["rate"]) is float
    with pytest.raises(fa.FedalignError, match=r"s\.size is missing"):
        check_options("s", {}, Sample)


def test_functions_without_annotations_and_with_further_keywords():
    def loose(a, b=2, *rest, **more): ...

    assert check_options("s", {"a": "x", "c": [1]}, loose) == {"a": "x", "b": 2, "c": [1]}
    assert "rest" not in options_of(loose)
    assert check_type("k", {"x": 1}, dict[str, int]) == {"x": 1}
    assert check_type("k", 3, int | float) == 3


def test_made_objects_have_pythons_types():
    kinds = Registry("sample", {"sample": (f"{__name__}:Sample", "")})
    sys.modules.setdefault(__name__, sys.modules[Sample.__module__])
    table = kinds.resolve("s", "sample(size=2, widths=[1], limit=false, path='a/b')")
    assert table["kind"] == next(iter(table.values())) == "sample"
    assert kinds.make(table) == Sample(2, widths=(1,), limit=None, path=Path("a/b"))
    assert kinds.make({"kind": "sample", "size": 2}, rule=fa.Everyone()).rule.offers(None, None)


def test_both_notations_give_the_same():
    table = registry.PARTICIPATION.resolve("participation", {"kind": "uniform", "fraction": 0.3})
    assert table == registry.PARTICIPATION.resolve("participation", "uniform(fraction=0.3)")
    assert table == registry.PARTICIPATION.resolve("participation", {"kind": "uniform(fraction=0.3)"})
    assert registry.PARTICIPATION.make(table) == fa.Uniform(0.3)
    with pytest.raises(fa.FedalignError, match="fraction is given twice"):
        registry.PARTICIPATION.resolve("participation", {"kind": "uniform(fraction=0.3)", "fraction": 0.3})
    with pytest.raises(fa.FedalignError, match=r"must be a section \[participation\] or a text, not 3"):
        registry.PARTICIPATION.resolve("participation", 3)
    several = registry.PARTICIPATION.resolve_all("p", "full; bernoulli(p=0.5)")
    assert several == registry.PARTICIPATION.resolve_all("p", ["full", {"kind": "bernoulli", "p": 0.5}])
    assert [table["kind"] for table in several] == ["full", "bernoulli"]
    with pytest.raises(fa.FedalignError, match=r"p\[1\] is 'ful'; did you mean 'full'"):
        registry.PARTICIPATION.resolve_all("p", ["full", "ful"])


@pytest.mark.parametrize("kinds", [v for v in vars(registry).values() if isinstance(v, Registry)], ids=lambda r: r.noun)
def test_all_built_ins_exist(kinds):
    for name, (reference, description) in kinds.entries.items():
        assert description
        module = reference.partition(":")[0]
        if module.startswith(("fedalign.aggregation.", "fedalign.training.adam", "fedalign.experiments.tensorboard")):
            pytest.importorskip(module)
        assert callable(kinds.find(name))


def test_every_data_set_can_be_named():
    assert set(DATASETS) <= set(registry.DATA.entries)


def test_a_users_rule_beside_the_file(tmp_path):
    write(tmp_path, HALF)
    assert registry.RULES.resolve("rule", "mine:Half(share=0.3)", tmp_path)["share"] == 0.3
    rule = registry.RULES.make({"kind": "mine:Half", "share": 0.3}, tmp_path)
    assert rule.share == 0.3
    assert isinstance(rule, fa.Align)
    assert registry.RULES.make({"kind": "mine:make"}, tmp_path).share == 0.25
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert sys.path[-1] == str(tmp_path.resolve())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:Haf", "rule is 'mine:Haf', but mine.py has no 'Haf'; did you mean 'Half'?"),
        ("mine:Other", "rule is 'mine:Other', which is the class Other, not a rule"),
        ("mine:number", "rule is 'mine:number', which is a int, not a rule"),
        ("miene:Half", "there is no module 'miene' beside the settings"),
        ("mine:Half.x", "is not of the form package.module:Name"),
        ("mine:Half(shares=1)", "unknown key rule.shares; did you mean 'share'?"),
        ("mine:Half(share='x')", "rule.share must be a number, not 'x'"),
    ],
)
def test_wrong_references(tmp_path, name, message):
    write(tmp_path, HALF)
    with pytest.raises(fa.FedalignError) as caught:
        registry.RULES.resolve("rule", name, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_objects_and_failing_constructors(tmp_path):
    write(tmp_path, HALF + "\ndef breaks(x: int = 0):\n    return 1 / x\n")
    with pytest.raises(fa.FedalignError, match="'mine:wrong' made a int, not a rule"):
        registry.RULES.make({"kind": "mine:wrong"}, tmp_path)
    with pytest.raises(fa.FedalignError, match=r"cannot make the rule 'mine:breaks': ZeroDivisionError.*mine.py, line"):
        registry.RULES.make({"kind": "mine:breaks"}, tmp_path)
    with pytest.raises(fa.FedalignError, match=r"epsilon is -1\.0"):
        registry.RULES.make({"kind": "mine:Half", "epsilon": -1.0}, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = z\n", r"cannot import 'mine': NameError: name 'z' is not defined \(mine.py, line 2\)"),
        ("def f(:\n", r"cannot import 'mine': SyntaxError.*\(mine.py, line 1\)"),
        ("import nowhere_at_all\n", r"cannot import 'mine': ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)\n", "cannot import 'mine': SystemExit: 3"),
    ],
)
def test_a_module_that_fails_says_its_own_error(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(fa.FedalignError, match=message):
        registry.RULES.find("mine:Half", tmp_path)
    assert "mine" not in sys.modules


def test_two_folders_with_the_same_module_name(tmp_path):
    for folder, share in (("a", 0.1), ("b", 0.2)):
        write(tmp_path / folder, HALF.replace("0.5", str(share)))
        write(tmp_path / folder, f"value = lambda: {share}\n", "ours/inner.py")
        write(tmp_path / folder, "", "ours/__init__.py")
    shares = [registry.RULES.make({"kind": "mine:Half"}, tmp_path / folder).share for folder in "abab"]
    assert shares == [0.1, 0.2, 0.1, 0.2]
    values = [user_modules.find("ours.inner:value", tmp_path / folder)() for folder in "aabba"]
    assert values == [0.1, 0.1, 0.2, 0.2, 0.1]
    first = registry.RULES.find("mine:Half", tmp_path / "a")
    assert registry.RULES.find("mine:Half", tmp_path / "a") is first
    with pytest.raises(fa.FedalignError, match="there is no module 'mine'"):
        registry.RULES.find("mine:Half", write(tmp_path / "c", "", "empty.txt"))


def test_neighbours_can_be_imported(tmp_path):
    write(tmp_path, "import helper\nvalue = helper.value\n")
    write(tmp_path, "def value(): return 7\n", "helper.py")
    assert user_modules.find("mine:value", tmp_path)() == 7


def test_a_users_file_never_hides_an_installed_module(tmp_path):
    import random

    write(tmp_path, HALF, "random.py")
    write(tmp_path, HALF, "numpy.py")
    with pytest.raises(fa.FedalignError, match="name of a module of Python's standard library"):
        registry.RULES.find("random:Half", tmp_path)
    with pytest.raises(fa.FedalignError, match="name of the installed module 'numpy'"):
        registry.RULES.find("numpy:Half", tmp_path)
    assert sys.modules["random"] is random
    write(tmp_path, HALF)
    registry.RULES.find("mine:Half", tmp_path)
    sys.modules.pop("colorsys", None)
    write(tmp_path, "raise ValueError\n", "colorsys.py")
    import colorsys

    assert colorsys.rgb_to_hsv


def test_a_module_on_pythons_path(tmp_path, monkeypatch):
    write(tmp_path / "site", HALF)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert registry.RULES.make({"kind": "mine:Half"}).share == 0.5
    assert registry.RULES.make({"kind": "mine:Half"}, tmp_path).share == 0.5
    write(tmp_path, HALF.replace("0.5", "0.75"))
    assert registry.RULES.make({"kind": "mine:Half"}, tmp_path).share == 0.75  # beside the file comes first


def test_losses_are_functions_with_options_or_classes(tmp_path):
    write(
        tmp_path,
        """
        import torch
        def scaled(outputs, targets, factor: float = 2.0):
            return factor * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        def plain(outputs, targets):
            return scaled(outputs, targets)
        class Scaled:
            def __init__(self, factor: float):
                self.factor = factor
            def __call__(self, outputs, targets):
                return scaled(outputs, targets, self.factor)
        """,
    )
    outputs, targets = torch.zeros(2, 3), torch.tensor([0, 1])
    usual = fa.cross_entropy(outputs, targets)
    losses = registry.LOSSES
    assert losses.make({"kind": "cross-entropy"}) is fa.cross_entropy
    assert losses.resolve("loss", "mine:plain", tmp_path) == {"kind": "mine:plain"}
    assert losses.resolve("loss", "mine:scaled", tmp_path) == {"kind": "mine:scaled", "factor": 2.0}
    for text, factor in (("mine:scaled(factor=3)", 3), ("mine:plain", 2), ("mine:Scaled(factor=5)", 5)):
        loss = losses.make(losses.resolve("loss", text, tmp_path), tmp_path)
        assert torch.equal(loss(outputs, targets), factor * usual)
    assert isinstance(losses.make({"kind": "mine:scaled", "factor": 3.0}, tmp_path), functools.partial)
    torch_loss = losses.make(losses.resolve("loss", "torch.nn:CrossEntropyLoss(reduction='none')"))
    assert torch.equal(torch_loss(outputs, targets), usual)
    with pytest.raises(fa.FedalignError, match=r"unknown key loss.factr; did you mean 'factor'"):
        losses.resolve("loss", "mine:scaled(factr=3)", tmp_path)


def test_simulate_takes_names_as_well_as_objects():
    fed = federation()
    local = {"kind": "adam", "lr": 0.01, "epochs": 1}
    named = fa.simulate(
        fed, {"kind": "logistic", "inputs": 6, "classes": 4}, "fedalign(epsilon=0.5)", 4, 0, local, "bernoulli(p=0.8)",
        device="cpu", loss="cross-entropy", server="fedavgm", aggregator="trimmed-mean(trim=0.3)",
        client_steps=["clip(length=0.1)"], server_steps=["length-bound"],
    )  # fmt: skip
    made = fa.simulate(
        fed, lambda: logistic(6, 4), fa.Align(0.5), 4, 0, fa.LocalAdam(lr=0.01, epochs=1), fa.Bernoulli(0.8),
        device="cpu", server=fa.FedAvgM(), aggregator=fa.TrimmedMean(0.3), client_steps=[fa.ClipUpdate(0.1)],
        server_steps=[fa.LengthBound()],
    )  # fmt: skip
    assert torch.equal(flat(named.model), flat(made.model))
    assert named.history.rounds == made.history.rounds
    with pytest.raises(fa.FedalignError, match="did you mean 'median'"):
        fa.simulate(fed, lambda: logistic(6, 4), rounds=1, aggregator="medain")
