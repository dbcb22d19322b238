"""Free clients whose data differ in kind: rotated images and permuted labels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.data import shifts
from fedalign.data.images import FashionMnist


def federation(clients=6, priority=2, samples=10, side=6):
    x = torch.randint(0, 256, (clients * samples, 1, side, side), dtype=torch.uint8, generator=torch.manual_seed(0))
    y = torch.arange(clients * samples) % 4
    parts = np.arange(clients * samples).reshape(clients, samples)
    return fa.Federation.from_partition(
        (x, y), list(parts), priority=[k < priority for k in range(clients)], test_parts=list(parts)
    )


def samples_of(fed, k, split="train"):
    rows = fed.clients[k].rows(split)
    return fed.pool.x[rows], fed.pool.y[rows]


def test_rotations_go_to_the_free_clients_in_turn_and_to_all_splits():
    fed = federation()
    made = shifts.changed(fed, shifts.rotations(fed, [0, 90]))
    for split in ("train", "heldout", "test"):
        for k in (0, 1, 2, 4):  # priority clients, and those whose turn is 0 degrees
            assert torch.equal(samples_of(made, k, split)[0], samples_of(fed, k, split)[0])
        for k in (3, 5):
            x, y = samples_of(made, k, split)
            assert torch.equal(x, torch.rot90(samples_of(fed, k, split)[0], 1, dims=(2, 3)))
            assert torch.equal(y, samples_of(fed, k, split)[1])
    assert made.roster == fed.roster


def test_small_angles_turn_the_same_way_as_quarter_turns():
    image = torch.zeros(1, 1, 21, 21, dtype=torch.uint8)
    image[0, 0, 4:10, 12:16] = 200
    near, exact = shifts.rotated(image, 89.9).int(), shifts.rotated(image, 90).int()
    assert (near - exact).abs().max() <= 8
    assert (shifts.rotated(shifts.rotated(image, 30), -30).int() - image.int()).abs().float().mean() < 5


@given(part=st.floats(0, 1), seed=st.integers(0, 99))
def test_permuted_labels_are_all_others_and_alike_for_all_permuted_clients(part, seed):
    fed = federation()
    made = shifts.changed(fed, shifts.permutations(fed, part, seed))
    permuted = [k for k in range(6) if not torch.equal(samples_of(made, k)[1], samples_of(fed, k)[1])]
    assert permuted == list(range(6 - int(part * 4 + 0.5), 6))
    before, after = (torch.cat([samples_of(one, k)[1] for k in (0, *permuted)])[8:] for one in (fed, made))
    pairs = set(zip(before.tolist(), after.tolist(), strict=True))
    assert all(a != b for a, b in pairs)
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # one and the same permutation
    for k in range(6):
        assert torch.equal(samples_of(made, k, "test")[0], samples_of(fed, k, "test")[0])


def test_what_cannot_be_changed_is_refused():
    with pytest.raises(fa.FedalignError, match="no images"):
        shifts.rotated(torch.zeros(3, 4), 90)
    with pytest.raises(fa.FedalignError, match="not square"):
        shifts.rotated(torch.zeros(3, 1, 4, 5), 90)
    with pytest.raises(fa.FedalignError, match=r"data.rotations must hold angles"):
        FashionMnist(rotations=[])
    with pytest.raises(fa.FedalignError, match=r"data.permuted must be a part"):
        FashionMnist(permuted=1.5)
