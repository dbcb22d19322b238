"""Whatever a node sends: the server goes on, refuses it with a reason, and holds no more than an honest reply needs."""

import json
import random
import tracemalloc
import types

import in_process
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.recorddict_pb2 import MetricRecord as MetricRecordProto
from flwr.proto.recorddict_pb2 import MetricRecordValue, SintList
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import history

from fedalign.flower import inbox
from fedalign.flower.fuzz import fuzz
from fedalign.flower.hostile_replies import MALFORMED, ODD_TEXTS, SIZE, forced, header, saved
from fedalign.flower.inbox import Inbox
from fedalign.flower.local_grid import LocalGrid
from fedalign.flower.replies import RECORDS, Unreadable, read_reply
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.server_app import Server
from fedalign.flower.settings import Settings
from fedalign.flower.texts import plain_text
from fedalign.flower.wire import HELLO, MEASURE, TRAIN, get_measure, get_outcomes
from fedalign.protocol.messages import Lost

federation, keys = in_process.federation, in_process.keys


@pytest.mark.parametrize("trust", ["report", "verify"])
def test_hostile_replies_are_refused_and_the_server_goes_on(trust):
    report = fuzz(replies=500, seed=1, trust=trust)
    assert report.replies >= 500
    assert report.failures == []
    assert len(report.outcomes) == len(MALFORMED) + 3
    assert report.megabytes < 300


PAYLOADS = {
    "npz": saved(np.zeros(SIZE, np.float32), np.savez),
    "36 TiB": header("(9895604649984,)", bytes(64)),
    "cut header": saved(np.zeros(SIZE, np.float32))[:40],
}


@pytest.mark.parametrize(("payload", "client"), [("npz", 5), ("36 TiB", 5), ("cut header", 5), ("npz", 1)])
def test_the_three_payloads_are_refused_with_the_reason(federation, tmp_path, payload, client):
    def attack(reply, message):
        if "model" in reply.content:
            array = Array("float32", (SIZE,), "numpy.ndarray", PAYLOADS[payload])
            reply.content["model"] = ArrayRecord({"flat": array})
        return reply

    grid, server = federation(rule="all", rounds=2, warmup=0.0, quorum=0.3)
    grid.tamper[client] = attack
    server().run()
    for record in history(tmp_path):
        assert record.clients[client].decision == "refused"
        assert record.clients[client].reason.startswith("its model ")
        assert record.clients[0].decision == "trained"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (10**400, "a whole number of more than 64 bits"),
        (2**60, "is not possible"),
        (-3, "is not possible"),
        ([50], "is not possible"),
        (50.5, "is not possible"),
        (float("nan"), "is not possible"),
        ("\x1b[2J", "a value of type str, not a number"),
        (object(), "a value of type object"),
    ],
)
def test_a_count_of_samples_that_is_not_possible_is_recorded(federation, tmp_path, said, reason):
    def boast(reply, message):
        if message.metadata.message_type == HELLO:
            reply.content["samples"] = forced(MetricRecord(), {"train": said, "heldout": 50, "test": 50})
        return reply

    grid, server = federation(rule="all", rounds=2, warmup=0.0)
    grid.tamper[5] = boast
    server().run()
    for record in history(tmp_path):
        assert record.clients[5].decision == "refused"
        assert reason in record.clients[5].reason
        assert not record.clients[5].reachable


@pytest.mark.parametrize("text", ODD_TEXTS[1:])
def test_texts_of_nodes_are_plain_in_the_record_and_in_the_log(federation, tmp_path, caplog, text):
    def decline(reply, message):
        if message.metadata.message_type == TRAIN:
            del reply.content["model"]
            reply.content["declined"] = ConfigRecord({"reason": text})
        return reply

    grid, server = federation(rule="all", rounds=1, warmup=0.0)
    grid.tamper[4] = decline
    grid.tamper[5] = lambda reply, message: Message(Error(99, f"why\n{text}"), reply_to=message)
    server().run()
    declined, lost = history(tmp_path)[0].clients[4:]
    assert declined.decision == "declined"
    for said in (declined.reason, lost.reason, *(r.getMessage() for r in caplog.records)):
        assert plain_text(said, 400) == said.strip()
    assert len(declined.reason) <= 200


def test_a_stranger_cannot_fill_the_record_with_metrics(federation, tmp_path):
    def boast(reply, message):
        if "metrics" in reply.content:
            reply.content["metrics"]["f1.\x1b[2J"] = 0.1
        return reply

    def several(reply, message):
        if "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord(
                {f"f1.{message.metadata.dst_node_id}-{i}": 0.5 for i in range(9000)}
            )
        return reply

    grid, server = federation(rule="all", rounds=1, warmup=0.0, metrics="f1")
    grid.tamper |= {3: several, 4: several, 5: boast}
    server().run()
    (record,) = history(tmp_path)
    assert next(iter(record.metrics)) == "f1"
    assert len(record.metrics) == 201
    assert all(plain_text(name) == name for name in record.metrics)
    assert record.metrics["f1"].clients[0] is not None


def test_a_stranger_cannot_fill_a_run_with_metrics_of_new_names(federation, tmp_path):
    def fresh(reply, message):
        if "metrics" in reply.content:
            t = len(history(tmp_path)) if (tmp_path / "out" / "rounds.jsonl").exists() else 0
            reply.content["metrics"] = MetricRecord({f"f1.{t}-{i}": 0.5 for i in range(150)})
        return reply

    grid, server = federation(rule="all", rounds=4, warmup=0.0, metrics="f1")
    grid.tamper[3] = fresh
    server().run()
    names = [set(record.metrics) for record in history(tmp_path)]
    assert all("f1" in of_round for of_round in names)
    assert len(set().union(*names)) == 201


@pytest.mark.parametrize("losses", [(1e308, -1e308), (1.7e308, 0.0, -1.7e308, 0.0)])
@pytest.mark.parametrize("settings", [{"trust": "report"}, {"trust": "verify"}])
def test_losses_too_large_to_be_subtracted_do_not_end_a_run_with_a_ledger(
    federation, tmp_path, monkeypatch, losses, settings
):
    monkeypatch.setenv("HOME", str(tmp_path))

    def boast(reply, message):
        if message.metadata.message_type == "train":
            loss = losses[int(message.content["task"]["round"]) % len(losses)]
            reply.content["measures"] = MetricRecord({"own.loss": loss, "own.samples": 10})
        return reply

    grid, server = federation(rule="all", rounds=4, warmup=0.0, ledger=True, **settings)
    grid.tamper[5] = boast
    server().run()
    rows = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if "round" in row] == [0, 1, 2, 3]
    said = [record.clients[5] for record in history(tmp_path)]
    assert [one.decision for one, loss in zip(said, losses * 2, strict=False) if abs(loss) > 1e100] == (
        ["refused"] * sum(abs(loss) > 1e100 for loss in (losses * 2)[:4])
    )


def test_metrics_that_are_too_large_to_be_summed_do_not_end_the_run(federation, tmp_path):
    def boast(reply, message):
        if "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord({"f1": 1.7e308, "f1.a": float("nan"), "f1.b": -float("inf")})
        return reply

    grid, server = federation(rule="all", rounds=2, warmup=0.0, metrics="f1")
    grid.tamper |= dict.fromkeys((3, 4, 5), boast)
    server().run()
    for record in history(tmp_path):
        values = record.metrics["f1"]
        assert values.clients[3:] == (None,) * 3
        assert values.free == values.clients[2]
        assert record.metrics.keys() == {"f1"}


scalars = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(), st.binary(max_size=20), st.none(), st.just(object())
)
values = st.one_of(scalars, st.lists(scalars, max_size=4), st.just(10**400))
names = st.one_of(st.text(max_size=8), st.sampled_from(sorted({n for of in RECORDS.values() for n in of})))
fields = st.one_of(st.text(max_size=8), st.sampled_from(["own.loss", "own.samples", "own.accuracy", "train", "flat"]))


@st.composite
def hostile_contents(draw):
    kinds = st.sampled_from([MetricRecord, ConfigRecord, ArrayRecord])
    made = {}
    for name in draw(st.lists(names, max_size=4)):
        made[name] = forced(draw(kinds)(), draw(st.dictionaries(fields, values, max_size=4)))
    return forced(RecordDict(), made)


@given(hostile_contents(), st.sampled_from([HELLO, MEASURE, TRAIN]))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_records_are_read_or_refused(content, kind):
    reply = types.SimpleNamespace(has_error=lambda: False, content=content)
    read = read_reply(reply, kind, 1.0, largest=100)
    if isinstance(read, Lost):
        assert isinstance(read, Unreadable)
        assert plain_text(read.reason) == read.reason
        return
    measure = get_measure(read, "own")
    assert measure is None or (type(measure.loss) is float and measure.samples >= 1)
    get_outcomes(read)


class SuperLink(HttpGrid):
    """Serves the objects of replies as the SuperLink's API does, from memory; ``objects`` maps a number to bytes."""

    def __init__(self, replies):
        super().__init__("nowhere", insecure=True, token="token")
        self.trees, self.objects, self.fetched, self.dropped = dict(replies), {}, 0, []

    run = property(lambda self: types.SimpleNamespace(run_id=1))
    _runtime_client = property(lambda self: self)

    def PullMessages(self, request):  # noqa: N802
        there = [i for i in request.message_ids if i in self.trees]
        trees = [self.trees.pop(i) for i in there]
        metadata = [
            Metadata(reply_to_message_id=i, message_id=tree.object_id) for i, tree in zip(there, trees, strict=True)
        ]
        return PullAppMessagesResponse(
            messages_list=[MessageProto(metadata=one) for one in metadata], message_object_trees=trees
        )

    def PullObject(self, request):  # noqa: N802
        content = self.objects.get(request.object_id)
        self.fetched += len(content or b"")
        found = request.object_id in self.objects
        return PullObjectResponse(object_found=found, object_available=bool(content), object_content=content or b"")

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.dropped.append(request.message_object_id)


@pytest.fixture
def honest(federation):
    """Give the honest reply of a node to a message with a model."""
    grid, server = federation(rule="all", rounds=1, warmup=0.0)
    kept = []
    grid.tamper[5] = lambda reply, message: kept.append(reply) or reply
    server().run()
    return next(reply for reply in kept if "model" in reply.content)


def tree_of(content, children=()):
    return ObjectTree(object_id=get_object_id(content), children=children)


def pulled(grid, largest=4 * SIZE + 1000, times=1):
    box = Inbox(grid, largest)
    return [dict(box.pull(["asked", "other"], TRAIN, 1.0)) for _ in range(times)][-1]


def test_an_honest_reply_arrives_in_parts(honest):
    grid = SuperLink({"asked": get_object_tree(honest), "nobody's": get_object_tree(honest)})
    objects = {number: found.deflate() for number, found in get_all_nested_objects(honest).items()}
    box = Inbox(grid, 4 * SIZE + 1000)
    grid.objects = dict.fromkeys(objects, b"")  # announced, and not there yet
    assert dict(box.pull(["asked"], TRAIN, 1.0)) == {}
    grid.objects = objects
    (content,) = dict(box.pull(["asked"], TRAIN, 1.0)).values()
    assert content["model"]["flat"].data == honest.content["model"]["flat"].data
    assert dict(content["measures"]) == dict(honest.content["measures"])
    assert grid.dropped == [honest.object_id]
    assert dict(box.pull(["asked"], TRAIN, 1.0)) == {}


def test_a_reply_that_is_announced_and_never_sent_holds_nobody_up(honest):
    grid = SuperLink({"asked": get_object_tree(honest), "other": ObjectTree(object_id="0" * 64)})
    grid.objects = {number: found.deflate() for number, found in get_all_nested_objects(honest).items()}
    grid.objects["0" * 64] = b""
    assert list(pulled(grid)) == ["asked"]
    grid = SuperLink({"asked": get_object_tree(honest)})
    assert pulled(grid)["asked"].reason == "its reply was announced, and not sent"


def test_a_reply_is_not_fetched_beyond_the_limit(honest):
    chunks = [b"ArrayChunk  %d\0" % (1 << 20) + bytes([i]) * (1 << 20) for i in range(40)]
    head = b"Message  0\0"
    grid = SuperLink({"asked": tree_of(head, [tree_of(chunk) for chunk in chunks])})
    grid.objects = {get_object_id(content): content for content in [head, *chunks]}
    assert "more than" in pulled(grid)["asked"].reason
    assert grid.fetched < 4 << 20
    grid = SuperLink({"asked": tree_of(head, [ObjectTree(object_id=f"{i:064}") for i in range(100_000)])})
    assert pulled(grid)["asked"].reason == "its reply has more than 64 parts"
    assert grid.fetched == 0


def with_record(kind, body):
    """Give the tree and the objects of a reply with one record, or array, of these bytes."""
    contents, tree = [], None
    for name, inner in (
        (kind, body),
        ("RecordDict", b'{"measures": ""}'),
        ("Message", MessageProto().SerializeToString()),
    ):
        child = tree.object_id if tree else ""
        contents.append(f"{name} {child} {len(inner)}\0".encode() + inner)
        tree = tree_of(contents[-1], [tree] if tree else [])
    return tree, {get_object_id(content): content for content in contents}


LISTS = b'{"arraychunk_ids": [%s[]]}' % (b"[]," * 1_700_000)
METRICS = MetricRecordProto(
    items=[
        MetricRecordProto.Item(key="own.tempered", value=MetricRecordValue(sint_list=SintList(vals=[1] * 5_000_000)))
    ]
).SerializeToString()


@pytest.mark.parametrize(("kind", "body"), [("Array", LISTS), ("MetricRecord", METRICS), ("ArrayRecord", LISTS)])
def test_words_are_limited_before_they_are_decoded(kind, body):
    largest = 80_000_000  # of a model of 10 million parameters
    tree, objects = with_record(kind, body)
    grid = SuperLink({"asked": tree})
    grid.objects = objects
    tracemalloc.start()
    try:
        reply = pulled(grid, largest)["asked"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.reason == f"its reply has more than {1 << 20} bytes besides arrays"
    assert peak < 3 * len(body)  # a copy of the fetched object


def test_words_beside_a_piece_of_an_array_are_limited(honest):
    head = b"ArrayChunk %s 3\0abc" % (b"," * (1 << 20))
    grid = SuperLink({"asked": tree_of(head)})
    grid.objects = {get_object_id(head): head}
    assert "bytes besides arrays" in pulled(grid, 1 << 30)["asked"].reason


@pytest.mark.parametrize("kind", [kind for kind, records in RECORDS.items() if ArrayRecord not in records.values()])
def test_only_replies_that_have_a_model_may_have_arrays(honest, kind):
    grid = SuperLink({"asked": get_object_tree(honest)})
    grid.objects = {number: found.deflate() for number, found in get_all_nested_objects(honest).items()}
    reply = dict(Inbox(grid, 1 << 30).pull(["asked"], kind, 1.0))["asked"]
    assert reply.reason == "the arrays of its reply have more than 0 bytes"


def test_a_reply_that_would_grow_is_refused_before_it_does(honest):
    chunk = b"ArrayChunk  1000\0" + bytes(1000)
    body = json.dumps(
        {"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 100_000}
    ).encode()
    array = f"Array {get_object_id(chunk)} {len(body)}\0".encode() + body
    grid = SuperLink({"asked": tree_of(array, [tree_of(chunk)])})
    grid.objects = {get_object_id(content): content for content in (chunk, array)}
    reply = pulled(grid)["asked"]
    assert isinstance(reply, Unreadable)
    assert reply.reason == f"the arrays of its reply have more than {4 * SIZE + 1000} bytes"


def test_mutated_objects_are_read_or_refused(honest):
    draw, tree = random.Random(0), get_object_tree(honest)
    objects = {number: found.deflate() for number, found in get_all_nested_objects(honest).items()}
    refused = 0
    for _ in range(1000):
        grid = SuperLink({"asked": tree})
        grid.objects = dict(objects)
        for number in draw.sample(sorted(objects), draw.choice([1, 1, 2])):
            data = bytearray(grid.objects[number])
            change = draw.choice(["flip", "cut", "add", "swap", "noise", "gone"])
            if change == "flip":
                for _ in range(draw.choice([1, 3, 20])):
                    data[draw.randrange(min(len(data), 200))] = draw.randrange(256)
            elif change == "cut":
                del data[draw.randrange(1, len(data)) :]
            elif change == "add":
                data += draw.randbytes(50)
            elif change == "swap":
                data = bytearray(objects[draw.choice(sorted(objects))])
            elif change == "noise":
                data = bytearray(draw.randbytes(draw.randrange(1, 200)))
            grid.objects[number] = bytes(data)
            if change == "gone":
                del grid.objects[number]
        reply = pulled(grid)["asked"]
        refused += isinstance(reply, Lost)
        assert not isinstance(reply, Lost) or plain_text(reply.reason, 300) == reply.reason
    assert refused > 500


def test_a_superlink_that_fails_at_one_reply_delivers_the_others(honest):
    class Failing(SuperLink):
        def PullMessages(self, request):  # noqa: N802
            if "other" in request.message_ids:
                status = types.SimpleNamespace(status_code=500)
                raise inbox.httpx.HTTPStatusError("500", request=None, response=status)
            return super().PullMessages(request)

    grid = Failing({"asked": get_object_tree(honest)})
    grid.objects = {number: found.deflate() for number, found in get_all_nested_objects(honest).items()}
    found = pulled(grid)
    assert found["other"].reason == "the SuperLink cannot deliver its reply"
    assert isinstance(found["asked"], RecordDict)


def test_a_hundred_nodes_in_one_process(tmp_path):
    config = {
        "model": "in_process:model", "data": "in_process:data", "roster": str(tmp_path / "roster.toml"),
        "out": str(tmp_path / "out"), "rounds": 1, "warmup": 0.0, "epsilon": 100.0, "trust": "report", "longest": 0.0,
        "wait": 0.0, "epochs": 1, "batch-size": 60,
    }  # fmt: skip
    grid = LocalGrid({k: {"partition-id": k % 6} for k in range(1, 101)}, config)
    entries = (Entry(fingerprint(key), f"site-{k}", k <= 10) for k, key in grid.keys.items())
    RosterFile(tuple(entries)).write(tmp_path / "roster.toml")
    Server(grid, Settings.read(config), run_id=1).run()
    (record,) = history(tmp_path)
    assert [c.decision for c in record.clients] == ["trained"] * 10 + ["admitted"] * 90
    assert record.models_up == 100
