"""A run's status and last round as Prometheus reads them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fedalign.errors import FedalignError
from fedalign.monitoring.status import STATES, ClientStatus, Status
from fedalign.monitoring.words import printable
from fedalign.protocol.records import RoundRecord

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:  # pragma: no cover
    raise FedalignError("prometheus-client is not installed: pip install 'fedalign[flower]'") from error

CONTENT_TYPE = CONTENT_TYPE_LATEST  #: of what :func:`exposition` returns
_FIGURES = {
    "global_loss": "Loss of the model that was sent out, weighted mean over the priority clients",
    "train_loss": "Loss of the round's model on the priority clients' training data",
    "test_loss": "Loss of the round's model on the priority clients' test data",
    "test_accuracy": "Accuracy of the round's model on the priority clients' test data",
    "heldout_loss": "Loss of the round's model on the priority clients' held-out data",
    "heldout_accuracy": "Accuracy of the round's model on the priority clients' held-out data",
}


class RunCollector:
    """Collects the metrics of one run; ``rounds`` are its records so far."""

    def __init__(self, status: Status, rounds: Sequence[RoundRecord], now: float) -> None:
        self._status, self._rounds, self._now = status, rounds, now

    def collect(self) -> Iterable[Metric]:
        """Give the metrics of the run, then those of its clients."""
        yield from self._run()
        yield from self._last_round()
        yield from self._clients()

    def _run(self) -> Iterable[Metric]:
        status = self._status
        state = GaugeMetricFamily("fedalign_state", "1 for the state that the run is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status.state_at(self._now) == name))
        yield state
        gauges = {
            "rounds_done": ("Rounds that are done", status.round),
            "rounds_planned": ("Rounds of the whole run", status.rounds),
            "round_attempts": ("Failed attempts at the present round", status.attempts),
            "quorum_needed_ratio": ("Part of the priority clients' weight that must answer", status.quorum.needed),
            "quorum_present_ratio": ("Part of the priority clients' weight that is connected", status.quorum.present),
            "heartbeat_timestamp_seconds": ("When the server last gave a sign of life", status.heartbeat),
            "started_timestamp_seconds": ("When the server's process began", status.started),
            "last_round_timestamp_seconds": ("When the last round ended", status.last_round),
            "last_round_seconds": ("How long the last round took", status.round_seconds),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"fedalign_{name}", text, value=value)
        waited = GaugeMetricFamily(
            "fedalign_last_round_waited_seconds", "Waiting for clients in the last round", labels=["purpose"]
        )
        for purpose, seconds in status.waited.items():
            waited.add_metric([purpose], seconds)
        yield waited

    def _last_round(self) -> Iterable[Metric]:
        rounds = self._rounds
        yield CounterMetricFamily(
            "fedalign_models_sent", "Models sent to clients", value=sum(r.models_down for r in rounds)
        )
        yield CounterMetricFamily(
            "fedalign_models_received", "Models received from clients", value=sum(r.models_up for r in rounds)
        )
        if rounds:
            yield GaugeMetricFamily("fedalign_free_admitted", "Free clients in the model", value=rounds[-1].admitted)
            for name, text in _FIGURES.items():
                if (value := getattr(rounds[-1], name)) is not None:
                    yield GaugeMetricFamily(f"fedalign_{name}", text, value=value)

    def _clients(self) -> Iterable[Metric]:
        labels = ["client", "role"]
        connected = GaugeMetricFamily("fedalign_client_connected", "1 if the client is connected", labels=labels)
        seen = GaugeMetricFamily(
            "fedalign_client_last_seen_timestamp_seconds",
            "When the client was last connected or answered",
            labels=labels,
        )
        weight = GaugeMetricFamily("fedalign_client_weight", "The client's part of the last model", labels=labels)
        samples = GaugeMetricFamily("fedalign_client_samples", "Training samples that count", labels=labels)
        decisions = CounterMetricFamily(
            "fedalign_client_decisions", "Rounds by what was decided about the client", labels=[*labels, "decision"]
        )
        counted: dict[int, Counter[str]] = defaultdict(Counter)
        for client_round in (c for r in self._rounds for c in r.clients):
            counted[client_round.id][client_round.decision] += 1
        for client in self._status.clients:
            who = _labels(client)
            connected.add_metric(who, float(client.connected))
            for family, value in ((seen, client.last_seen), (weight, client.weight), (samples, client.samples)):
                if value is not None:
                    family.add_metric(who, float(value))
            for decision, number in counted[client.id].items():
                decisions.add_metric([*who, decision], number)
        yield from (connected, seen, weight, samples, decisions)


def exposition(status: Status, rounds: Sequence[RoundRecord], now: float) -> bytes:
    """Return a run's metrics in Prometheus' text format.

    >>> from fedalign.monitoring.status import Quorum
    >>> status = Status("running", 3, 50, "fedalign", "1", 0.0, 100.0, 3.0, Quorum(1.0, 0.5))
    >>> b"fedalign_quorum_present_ratio 0.5" in exposition(status, [], 101.0)
    True
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(status, rounds, now))
    return generate_latest(registry)


def _labels(client: ClientStatus) -> list[str]:
    return [printable(client.name), "priority" if client.priority else "free"]
