"""Messages to many nodes go out a few at a time, because Flower announces all of a call before it sends any part."""

from flwr.app import RecordDict

from fedalign.flower.exchange import Exchange
from fedalign.flower.local_grid import LocalGrid
from fedalign.flower.patience import Patience


class Noting(LocalGrid):
    """Notes which nodes each call has messages for; it refuses calls with a message for the node ``too_large``."""

    too_large = -1

    def push_messages(self, messages):
        self.calls = [*getattr(self, "calls", []), [message.metadata.dst_node_id for message in messages]]
        if self.too_large in self.calls[-1]:
            return []  # as Flower's grid does
        return [f"message-to-{node}" for node in self.calls[-1]]


def post(too_large=-1):
    grid = Noting({100 + k: {} for k in range(20)}, {})
    grid.too_large = too_large
    exchange = Exchange(grid, Patience(60.0, 60.0), largest=1000)
    exchange.nodes = {k: 100 + k for k in range(20)}
    return grid, exchange.post("train", {k: RecordDict() for k in range(20)})


def test_many_messages_are_announced_a_few_at_a_time():
    grid, posted = post()
    assert [len(nodes) for nodes in grid.calls] == [8, 8, 4]
    assert [node for nodes in grid.calls for node in nodes] == [100 + k for k in range(20)]
    assert {number: one.client for number, one in posted.items()} == {f"message-to-{100 + k}": k for k in range(20)}


def test_messages_that_could_not_be_sent_shift_no_other_clients():
    _, posted = post(too_large=109)
    assert {number: one.client for number, one in posted.items()} == {
        f"message-to-{100 + k}": k for k in range(20) if not 8 <= k < 16
    }
