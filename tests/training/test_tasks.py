"""Sequences, multi-label and one-logit tasks: losses and accuracies by hand, and both engines agree."""

import pytest
import torch
import torch.nn.functional as F
from conftest import flat
from torch import nn

import fedalign as fa
from fedalign.training.losses import binary_cross_entropy, cross_entropy, hits


def test_sequences_by_hand():
    draw = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(4, 5, 7, generator=draw), torch.randint(7, (4, 5), generator=draw)
    targets[1, 3:] = -100
    targets[2] = -100
    for n in range(4):
        kept = targets[n] != -100
        loss = F.cross_entropy(scores[n][kept], targets[n][kept]) if kept.any() else torch.tensor(0.0)
        assert cross_entropy(scores, targets)[n].item() == pytest.approx(loss.item(), rel=1e-6)
        right = (scores[n].argmax(1) == targets[n])[kept].double()
        assert hits(scores, targets)[n].item() == pytest.approx(right.mean().item() if kept.any() else 0.0)
    assert torch.equal(cross_entropy(scores.transpose(1, 2), targets), cross_entropy(scores, targets))


def test_logits_by_hand():
    logits, labels = torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([[1, 1], [0, 1]])
    assert hits(logits, labels).tolist() == [0.5, 0.5]
    wanted = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    assert torch.equal(binary_cross_entropy(logits, labels), wanted)
    assert hits(torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 1])).tolist() == [1.0, 0.0]


class Sequences(nn.Module):
    """A causal layer over embeddings, which both engines can stack."""

    def __init__(self):
        super().__init__()
        self.embed, self.scores = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens):
        return self.scores(self.embed(tokens).cumsum(1))


def tokens():
    text = (torch.arange(40).view(40, 1) + torch.tensor([1, 1, 2]).view(3, 1, 1) * torch.arange(6)) % 10
    text = [(part[:, :-1].to(torch.int32), part[:, 1:].clone()) for part in text]
    for _, targets in text:
        targets[::3, 3:] = -100
    return text


def labelled(kind):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 40, 4, generator=draw)
    y = x @ torch.randn(4, 2, generator=draw) > 0
    return [(a, b) for a, b in zip(x, {"several": y, "one": y[..., 0], "float": y.float()}[kind], strict=True)]


TASKS = {
    "sequences": (tokens, Sequences, "cross-entropy"),
    "multi-label": (lambda: labelled("several"), lambda: nn.Linear(4, 2), "binary-cross-entropy"),
    "multi-label, floats, network": (
        lambda: labelled("float"),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 2)),
        "binary-cross-entropy",
    ),
    "one logit": (lambda: labelled("one"), lambda: nn.Linear(4, 1), "binary-cross-entropy"),
}


@pytest.mark.parametrize("task", list(TASKS))
def test_engines_agree(task):
    data, model, loss = TASKS[task]
    fed = fa.Federation.from_arrays(data(), priority=[True, True, False], test_fraction=0.2)
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=7)
    fast, slow = (fa.simulate(fed, model, "all", 3, 0, local, loss=loss, engine=e) for e in ("batched", "reference"))
    assert torch.allclose(flat(fast.model), flat(slow.model), atol=1e-5)
    for a, b in zip(fast.history.rounds, slow.history.rounds, strict=True):
        assert a.test_accuracy == pytest.approx(b.test_accuracy)
        assert a.test_loss == pytest.approx(b.test_loss, rel=1e-4)
    assert 0 < fast.history[-1].test_accuracy <= 1


def test_held_out_sequences_are_drawn_at_random():
    y = torch.arange(100).view(100, 1).repeat(1, 2)
    fed = fa.Federation.from_arrays([(y, y)] * 2, priority=[True, False])
    held = fed.clients[0].heldout
    assert held.max() > 60  # and not the twenty smallest


@pytest.mark.parametrize(
    ("y", "model", "loss", "message"),
    [
        (torch.tensor([0, 2] * 10), nn.Linear(4, 1), "binary-cross-entropy", "the targets hold 2"),
        (torch.rand(20, 2), nn.Linear(4, 2), "binary-cross-entropy", "must be 0 or 1"),
        (torch.tensor([0, 1] * 10), nn.LSTM(4, 2), "cross-entropy", "must return a tensor, not a tuple"),
        (torch.tensor([[0, 11]] * 20), nn.Unflatten(1, (2, 2)), "cross-entropy", "label 11"),
    ],
)
@pytest.mark.filterwarnings("ignore:outputs of shape")
def test_bad_tasks(y, model, loss, message):
    x = torch.randn(20, 4)
    fed = fa.Federation.from_arrays([(x, y)] * 2, priority=[True, False])
    with pytest.raises(fa.FedalignError, match=message):
        fa.simulate(fed, nn.Sequential(nn.Linear(4, 4), model), rounds=1, loss=loss)


def test_two_readings_of_scores_are_said():
    x = torch.arange(10).repeat(20, 1)
    fed = fa.Federation.from_arrays([(x, x)] * 2, priority=[True, False])
    with pytest.warns(fa.FederationWarning, match=r"\(samples, positions, classes\)"):
        fa.simulate(fed, Sequences, rounds=1)


def test_tokens_in_uint8_get_a_hint():
    x = torch.zeros(20, 3, dtype=torch.uint8)
    fed = fa.Federation.from_arrays([(x, x.long())] * 2, priority=[True, False])
    with pytest.raises(fa.FedalignError, match="give tokens as int64"):
        fa.simulate(fed, Sequences, rounds=1)


def test_full_batch_by_name():
    assert fa.LocalSGD(lr=0.1, epochs=2, batch_size="full") == fa.LocalSGD(lr=0.1, epochs=2, batch_size=None)
