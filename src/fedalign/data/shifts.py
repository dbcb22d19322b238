"""Clients whose data differ in kind: rotated images and permuted labels, made from the clients of a federation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedalign.data.client import Client
from fedalign.data.federation import Federation
from fedalign.data.samples import Tensors
from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, permutation

Change = Callable[[Tensors], Tensors]  #: makes other samples of a client's features and labels
_CLASSES = 100  # separates this draw from those of partitions


def changed(federation: Federation, changes: Mapping[int, Change]) -> Federation:
    """Return a federation in which some clients have changed samples, in training, held-out and test data alike.

    ``changes`` says how, by client. Changed samples are copies: clients that share samples with them keep theirs.

    >>> samples = torch.zeros(8, 2), torch.tensor([0, 1] * 4)
    >>> fed = Federation.from_partition(samples, [[0, 1, 2, 3], [4, 5, 6, 7]], priority=[True, False])
    >>> fed = changed(fed, {1: lambda samples: (samples[0] + 1, samples[1])})
    >>> fed.pool.x[fed.clients[0].train].max().item(), fed.pool.x[fed.clients[1].train].min().item()
    (0.0, 1.0)
    """
    if not changes:
        return federation
    pool, clients = federation.pool, list(federation.clients)
    xs, ys, end = [pool.x], [pool.y], len(pool.y)
    for k, change in sorted(changes.items()):
        splits = (clients[k].train, clients[k].heldout, clients[k].test)
        rows = torch.from_numpy(np.concatenate(splits))
        x, y = change((pool.x[rows], pool.y[rows]))
        new = np.split(np.arange(end, end + len(rows)), np.cumsum([len(split) for split in splits])[:-1])
        clients[k] = Client(clients[k].name, clients[k].priority, *new)
        xs, ys, end = [*xs, x], [*ys, y], end + len(rows)
    return Federation(replace(pool, x=torch.cat(xs), y=torch.cat(ys)), clients)


def rotations(federation: Federation, angles: Sequence[float]) -> dict[int, Change]:
    """Rotate the free clients' images by these angles in degrees, in turn; an angle of 0 changes nothing."""
    free = [k for k, client in enumerate(federation.clients) if not client.priority]
    given = {k: angles[j % len(angles)] for j, k in enumerate(free)}

    def by(angle: float) -> Change:
        return lambda samples: (rotated(samples[0], angle), samples[1])

    return {k: by(angle) for k, angle in given.items() if angle % 360}


def permutations(federation: Federation, part: float, seed: int) -> dict[int, Change]:
    """Permute the labels of the last free clients, so many that they are this part of all free clients.

    All have the same permutation, in which no class keeps its number.
    """
    free = [k for k, client in enumerate(federation.clients) if not client.priority]
    count = math.floor(part * len(free) + 0.5)
    classes = int(federation.pool.y.max()) + 1
    order = torch.from_numpy(permutation(classes, seed, Purpose.DATA, _CLASSES))
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return {k: lambda samples: (samples[0], other[samples[1]]) for k in free[len(free) - count :]}


def rotated(images: torch.Tensor, angle: float) -> torch.Tensor:
    """Rotate images counter-clockwise by an angle in degrees; what comes from outside is 0.

    Quarter turns are exact. Other angles interpolate between the four nearest pixels.

    >>> rotated(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8), 90)
    tensor([[[[2, 4],
              [1, 3]]]], dtype=torch.uint8)
    """
    if images.dim() != 4:
        raise FedalignError(f"samples of shape {tuple(images.shape[1:])} are no images and cannot be rotated")
    if images.shape[-1] != images.shape[-2]:
        raise FedalignError(f"images of {images.shape[-2]} × {images.shape[-1]} pixels are not square")
    if angle % 90 == 0:
        return torch.rot90(images, round(angle / 90) % 4, dims=(-2, -1)).contiguous()
    turn = math.radians(angle)
    matrix = torch.tensor([[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]])
    turned = []
    for some in torch.split(images, 4096):  # as float32 numbers, all of them could fill the memory
        grid = torch.nn.functional.affine_grid(matrix.expand(len(some), 2, 3), list(some.shape), align_corners=False)
        found = torch.nn.functional.grid_sample(some.float(), grid, padding_mode="zeros", align_corners=False)
        turned.append(found if images.is_floating_point() else found.round().clamp(0, 255).to(images.dtype))
    return torch.cat(turned)
