"""Free clients that are slow, hang or lie about it cost the others little, and do so only for a while.

The clock is a fake one: the server's pauses move it, and nodes answer after delays on it.
"""

import in_process
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from in_process import history

from fedalign.flower.audit import read
from fedalign.flower.bench import Bench
from fedalign.flower.parcels import MISSING
from fedalign.monitoring.status import read_status

federation, keys = in_process.federation, in_process.keys
WORK = {(k, "train"): 10.0 for k in range(6)} | {(k, "evaluate"): 2.0 for k in range(6)}
NEVER = 1e9


@pytest.fixture
def slow(federation):
    """Give a function that runs six nodes that need some time, and returns the grid and the seconds of each round."""

    def run(delays=(), tamper=None, **settings):
        config = {"rule": "all", "warmup": 0.0, "timeout": 600.0, "wait": 60.0, "rounds": 3}
        grid, server = federation(**(config | settings))
        grid.delays = WORK | dict(delays)
        grid.tamper = tamper or {}
        grid.ends = []
        made = server(grid.timer)
        keep = made._keep

        def kept(done, seconds):
            grid.ends.append(grid.timer.now())
            keep(done, seconds)

        made._keep = kept
        begin = grid.timer.now()
        made.run()
        grid.seconds = [after - before for before, after in zip([begin, *grid.ends], grid.ends, strict=False)]
        return grid

    return run


def decisions(rounds, k):
    return [r.clients[k].decision for r in rounds]


def test_slow_clients_are_waited_for_if_all_are_slow(slow, tmp_path):
    slow(out=str(tmp_path / "quick"))
    slow({(k, "train"): 400.0 + k for k in range(6)})
    assert history(tmp_path) == history(tmp_path, "quick")
    assert decisions(history(tmp_path), 5) == ["admitted"] * 3


def test_a_slow_volunteer_does_not_double_a_round_and_is_benched(slow, tmp_path):
    honest = slow(out=str(tmp_path / "honest"), rounds=9).seconds
    grid = slow({(5, "train"): NEVER}, rounds=9)
    assert all(mine < 2 * theirs for mine, theirs in zip(grid.seconds, honest, strict=True))
    rounds = history(tmp_path)
    assert decisions(rounds, 5) == ["lost", "lost", "absent", "absent", "lost", "absent", "absent", "absent", "absent"]
    assert rounds[0].clients[5].reason.endswith("s, when the round went on without it")
    assert rounds[1].clients[5].reason == "it is still busy with an earlier message"
    assert rounds[2].clients[5].reason.startswith("benched for 2 more rounds: ")
    assert rounds[3].clients[5].reason.startswith("benched for 1 more round: ")
    assert read_status(tmp_path / "out").clients[5].reason == rounds[-1].clients[5].reason
    for r in rounds:
        assert [c.decision for c in r.clients[:5]] == ["trained"] * 2 + ["admitted"] * 3
    events = [e for e in read(tmp_path / "out") if e["event"] in ("client_benched", "client_returns")]
    assert [(e["event"], e["round"], e["details"].get("rounds")) for e in events] == [
        ("client_benched", 2, 2), ("client_returns", 4, None), ("client_benched", 5, 4),
    ]  # fmt: skip
    assert {e["client"] for e in events} == {"site-5"}
    told = [m for m in grid.sent if m.metadata.message_type == "query.benched"]
    assert [(m.metadata.dst_node_id, m.content["task"]["rounds"]) for m in told] == [(105, 2), (105, 4)]


def test_a_straggler_does_not_double_a_short_round(slow, tmp_path):
    quick = {(k, "train"): 2.0 for k in range(6)} | {(k, "evaluate"): 0.2 for k in range(6)}
    honest = slow(quick, out=str(tmp_path / "honest")).seconds
    grid = slow({**quick, (5, "train"): NEVER}, rounds=3)
    assert decisions(history(tmp_path), 5)[0] == "lost"
    assert all(mine < 2 * theirs + 0.5 for mine, theirs in zip(grid.seconds, honest, strict=True))


def test_a_priority_client_is_given_the_whole_grace_time(slow, tmp_path):
    short = {(k, "train"): 1.0 for k in range(6)} | {(k, "evaluate"): 0.5 for k in range(6)}
    slow(short | {(0, "train"): 5.0, (5, "train"): 5.0}, quorum=0.4, rounds=2)
    rounds = history(tmp_path)
    assert decisions(rounds, 0) == ["trained"] * 2
    slow(short | {(5, "train"): 5.0}, quorum=0.4, rounds=2, out=str(tmp_path / "free"))
    assert decisions(history(tmp_path, "free"), 5) == ["lost"] * 2


def test_a_benched_node_says_so_in_its_log(federation, tmp_path):
    nodes = {k: {"partition-id": k} for k in range(6)}
    nodes[5]["log"] = str(tmp_path / "site-5.jsonl")
    grid, server = federation(nodes=nodes, rule="all", warmup=0.0, timeout=600.0, rounds=3)
    grid.delays = {(5, "train"): NEVER}
    server(grid.timer).run()
    assert "benched this node for 2 rounds" in (tmp_path / "site-5.jsonl").read_text()


def test_a_late_answer_is_dropped_and_its_node_asked_again(slow, tmp_path):
    grid = slow({(5, "train"): 17.5}, rounds=2)  # it comes while the others measure the next model
    assert decisions(history(tmp_path), 5) == ["lost"] * 2
    assert sum(m.metadata.message_type == "train" and m.metadata.dst_node_id == 105 for m in grid.sent) == 2


def test_a_hanging_majority_costs_the_deadline_once(slow, tmp_path):
    silent = {(k, "train"): NEVER for k in (3, 4, 5)}
    grid = slow(silent, free_timeout=100.0)
    assert 100 < grid.seconds[0] < 120
    assert grid.seconds[1] < 30
    assert decisions(history(tmp_path), 2) == ["admitted"] * 3
    assert history(tmp_path)[0].clients[4].reason == "no answer in 100 s"


def test_free_clients_have_a_deadline_of_their_own(slow, tmp_path):
    grid = slow({(5, "train"): NEVER}, free_part=1.0, free_timeout=30.0, rounds=1)
    assert history(tmp_path)[0].clients[5].reason == "no answer in 30 s"
    assert grid.seconds[0] < 40


def test_a_slow_priority_client_is_waited_for_unless_the_quorum_is_there(slow, tmp_path):
    grid = slow({(1, "train"): 200.0}, rounds=1)
    assert decisions(history(tmp_path), 1) == ["trained"]
    assert grid.seconds[0] > 200
    grid = slow({(1, "train"): 200.0}, rounds=3, quorum=0.3, out=str(tmp_path / "most"))
    assert max(grid.seconds) < 40
    # It is not benched: the federation is its own.
    assert set(decisions(history(tmp_path, "most"), 1)) == {"lost"}


def test_a_hanging_hello_delays_no_round(slow, tmp_path):
    honest = slow(out=str(tmp_path / "honest")).seconds
    grid = slow({(5, "query.hello"): NEVER})
    assert grid.seconds[0] <= honest[0] + 6  # the grace time at the start of the run
    assert grid.seconds[1:] == pytest.approx(honest[1:])
    assert {(c.decision, c.reason) for c in (r.clients[5] for r in history(tmp_path))} == {
        ("absent", "it has not said yet how many samples it has")
    }


def test_a_late_hello_joins_a_later_round(slow, tmp_path):
    slow({(5, "query.hello"): 20.0})
    assert decisions(history(tmp_path), 5) == ["absent", "admitted", "admitted"]


def test_a_priority_client_with_a_slow_hello_is_waited_for(slow, tmp_path):
    slow({(1, "query.hello"): 200.0}, rounds=1)  # longer than the setting wait, because it is connected
    assert decisions(history(tmp_path), 1) == ["trained"]


def test_who_asks_for_a_model_again_and_hangs_has_the_grace_time(slow, tmp_path):
    asked = []

    def again(reply, message):
        if message.metadata.message_type != "train":
            return reply
        asked.append(1)
        if len(asked) % 2 == 0:
            return None
        return Message(RecordDict({MISSING: ConfigRecord({"model": "a" * 64})}), reply_to=message)

    grid = slow(tamper={5: again}, cache=True)
    assert decisions(history(tmp_path), 5)[:2] == ["lost", "lost"]
    assert max(grid.seconds) < 40


def test_the_metrics_of_a_slow_client_are_missing(slow, tmp_path):
    slow({(5, "evaluate"): NEVER}, metrics="f1", rounds=1)
    (record,) = history(tmp_path)
    assert record.clients[5].decision == "admitted"
    values = record.metrics["f1"].clients
    assert values[5] is None
    assert None not in values[:5]


def hangs_every(period):
    """Give what makes a node leave out every so manieth round of training, the first one included."""
    asked = []

    def tampered(reply, message):
        if message.metadata.message_type != "train":
            return reply
        asked.append(1)
        return None if len(asked) % period == 1 else reply

    return tampered


@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_majority_that_hangs_now_and_then_costs_the_deadline_once_and_is_benched(slow, tmp_path, period):
    rounds, deadline = 30, 100.0
    honest = slow(out=str(tmp_path / "honest"), rounds=rounds).seconds
    grid = slow(tamper={k: hangs_every(period) for k in (3, 4, 5)}, free_timeout=deadline, rounds=rounds)
    assert grid.seconds[0] < honest[0] + deadline + 5
    assert all(mine < 2 * theirs for mine, theirs in zip(grid.seconds[1:], honest[1:], strict=True))
    assert sum(grid.seconds) < sum(honest) + deadline + 10 * 10  # the grace time, less and less often
    for k in (3, 4, 5):
        found = decisions(history(tmp_path), k)
        assert found.count("lost") <= 8  # it is benched for 2, 4, 8 … rounds
        assert found.count("absent") >= 10
    assert decisions(history(tmp_path), 2) == ["admitted"] * rounds


def test_what_flower_says_of_a_node_that_did_not_answer_counts_as_a_miss(slow, tmp_path):
    def gone(reply, message):  # the SuperLink's clock may run out a moment before the server's
        return Message(Error(3, "unavailable"), reply_to=message) if "model" in reply.content else reply

    slow(tamper={5: gone}, rounds=3)
    assert decisions(history(tmp_path), 5) == ["lost", "lost", "absent"]
    assert history(tmp_path)[2].clients[5].reason == "benched for 2 more rounds: no answer in 600 s"


def test_who_sends_what_cannot_be_read_is_benched(slow, tmp_path):
    def odd(reply, message):
        if message.metadata.message_type == "train":
            reply.content["extra"] = MetricRecord()
        return reply

    slow(tamper={0: odd, 5: odd}, rounds=3, quorum=0.3)
    assert decisions(history(tmp_path), 5) == ["refused", "refused", "absent"]
    assert "unexpected record 'extra'" in history(tmp_path)[2].clients[5].reason
    assert decisions(history(tmp_path), 0) == ["refused"] * 3  # a priority client


def test_a_score_rises_with_each_miss_and_falls_with_each_answer():
    bench = Bench()
    assert bench.note(0, {7: "late"}, []) == {}
    for round in range(1, 17):
        assert not bench.is_reliable(7)
        assert bench.note(round, {}, [7, 8]) == {}
    assert bench.is_reliable(7)
    assert bench.note(17, {7: "late"}, []) == {}  # as if it were the first time
    for round in range(18, 33):
        bench.note(round, {}, [7])
    assert bench.note(33, {7: "late"}, [])[7].rounds == 2
    assert bench.at(35).keys() == {7}
    assert bench.at(36) == {}
    lengths = []
    for round in range(36, 260):
        if not bench.at(round):
            lengths += [one.rounds for one in bench.note(round, {7: "late"}, []).values()]
    assert lengths == [4, 8, 16, 32, 64, 64, 64]
