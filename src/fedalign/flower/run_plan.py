"""The plan of a run over Flower, and the snapshot that its server keeps of a round."""

from __future__ import annotations

from dataclasses import replace

from fedalign.flower.control_variates import ControlVariates
from fedalign.flower.live_work import LiveWork
from fedalign.flower.members import Members
from fedalign.flower.settings import Settings
from fedalign.protocol.messages import RoundDone, Snapshot
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.simulation.engine.layout import Layout
from fedalign.training.server import Partial


def plan_of(settings: Settings, layout: Layout, members: Members) -> Plan:
    """Make the plan that the run's algorithm follows."""
    rule, server = settings.make_rule(), settings.recipe.server
    if server is not None and layout.trainable_size < layout.size:
        server = Partial(server, layout.trainable_size)
    return Plan(
        rule=rule,
        rounds=settings.rounds,
        warmup=warmup_rounds(settings.warmup_of_arm(), settings.rounds),
        match_on=rule.match_on or settings.match_on,
        server=server,
        work=LiveWork(members, settings.make_local()),
        ledger=settings.make_ledger(),
        seed=settings.seed,
    )


def complete(done: RoundDone, controls: ControlVariates) -> RoundDone:
    """Add to a round's snapshot what the driver keeps for the run: SCAFFOLD's control variates."""
    old = done.snapshot
    return replace(done, snapshot=Snapshot(old.round, {**old.tensors, **controls.named()}, old.values))
