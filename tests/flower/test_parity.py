"""Every rule and option of the simulation over Flower: the same decisions in every round, the same weights.

The cases come from the registries, so that a new rule, aggregator or optimiser is tested without a change here. What
needs options has them in ``OPTIONS``. Every case is run to its end, and again with a resume.
"""

import in_process
import pytest
from parity import both_ways

from fedalign import registry

federation, keys = in_process.federation, in_process.keys
HERE = __name__

#: Options of what cannot be made without, and more of some.
OPTIONS = {
    "rule": {"gradient": "(threshold=0.1)", "choice": "(clients=2)", "weighted": "(power=2.0)"},
    "aggregator": {
        "trimmed-mean": "(trim=0.2)",
        "krum": "(f=1)",
        "multi-krum": "(f=1)",
        "nnm": "(f=1, then='median')",
        "bucketing": "(size=2)",
    },
    "participation": {"uniform": "(fraction=0.7)", "replacement": "(draws=2)", "bernoulli": "(p=0.5)"},
    "client step": {"clip": "(length=0.5)"},
    "server step": {"length-bound": "(times=1.5)"},
}


def entries(kind, *without):
    """List the texts of all built-ins of a registry."""
    options = OPTIONS.get(kind.noun, {})
    return [f"{name}{options.get(name, '')}" for name in kind.entries if name not in without]


def decisions(rounds):
    return {c.decision for r in rounds for c in r.clients if not c.priority and not r.warmup}


@pytest.mark.parametrize("rule", entries(registry.RULES, "local"))
def test_rules(federation, tmp_path, rule):
    both_ways(federation, tmp_path, {"arm.own": rule})


@pytest.mark.parametrize("aggregator", entries(registry.AGGREGATORS, "mean"))
def test_aggregators(federation, tmp_path, aggregator):
    mine, _ = both_ways(federation, tmp_path, {"aggregator": aggregator})
    assert "admitted" in decisions(mine)
