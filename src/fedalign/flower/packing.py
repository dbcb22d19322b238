"""Packs models for the wire, without loss: as differences to a model that the receiver has, compressed byte by byte.

Two models of neighbouring rounds differ little, so that the upper bytes of most differences are zero. The difference is
that of the numbers' bit patterns in their order, hence exact. Each byte of the numbers is a plane of its own, which is
deflated where that saves something: the lower bytes are noise, and travel as they are.

A 16-bit format is lossy: the differences of the trainable numbers are rounded to it. Both sides then hold the rounded
model (:meth:`Packing.rounded`). Numbers that are not trained, such as BatchNorm's statistics, stay exact. Frozen
parameters never travel: both sides have them from the initial model.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError
from fedalign.flower.settings import Settings
from fedalign.simulation.engine.layout import Layout

Transport = Literal["exact", "bfloat16", "float16"]
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PLANE = struct.Struct("<BQ")  # whether it is deflated, and its length in bytes
_HEAD = struct.Struct("<b")  # the exponent of the 16-bit numbers' unit
_SAMPLE = 1 << 16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Packing:
    """How models of one run are packed; the server and all clients make the same one.

    ``initial`` is the flat initial model, ``frozen`` the number of frozen parameters, which lie after the trainable
    ones.

    >>> packing = Packing(torch.zeros(1000), trainable=1000)
    >>> model = torch.linspace(0, 1, 1000)
    >>> packed = packing.pack(model + 1e-5, base=model)
    >>> len(packed) < 3000, bool(torch.equal(packing.unpack(packed, base=model), model + 1e-5))
    (True, True)
    """

    initial: torch.Tensor
    trainable: int
    frozen: int = 0
    transport: Transport = "exact"
    compress: bool = True

    @classmethod
    def of(cls, settings: Settings) -> Packing:
        """Make the packing of a run; the server and every client make the same one."""
        module = settings.make_module()
        layout = Layout(module)
        # Where a run starts from a file on the server, nodes do not have its frozen parameters.
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad) if not settings.start else 0
        initial = layout.flatten(module).cpu()
        return cls(initial, layout.trainable_size, frozen, settings.transport, settings.compress)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is compressed or rounded, so that models may travel as plain arrays."""
        return self.transport == "exact" and not self.compress

    def rounded(self, model: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return what the receiver makes of a model that is packed against a base: with frozen parameters as initial.

        Without a 16-bit format and frozen parameters it is the model itself.
        """
        if not self.frozen and self.transport == "exact":
            return model
        made, end = model.clone(), self.trainable
        made[end : end + self.frozen] = self.initial[end : end + self.frozen]
        if self.transport != "exact":
            codes, exponent = self._codes(model, base)
            made[:end] = self._sum(base, codes, exponent)
        return made

    def pack(self, model: torch.Tensor, base: torch.Tensor | None) -> bytes:
        """Pack a model as the difference to a base, or whole; a 16-bit format needs a base.

        What comes out at the other end is :meth:`rounded`.
        """
        rest = self._rest(model)
        below = None if base is None else self._rest(base)
        if self.transport == "exact" or base is None:
            whole = torch.cat([model[: self.trainable], rest])
            against = None if base is None or below is None else torch.cat([base[: self.trainable], below])
            return b"".join(self._planes(_words(whole, against)))
        codes, exponent = self._codes(model, base)
        words = codes.view(torch.int16).numpy().view(np.uint16)
        return b"".join([_HEAD.pack(exponent), *self._planes(words), *self._planes(_words(rest, below))])

    def unpack(self, data: bytes | memoryview, base: torch.Tensor | None) -> torch.Tensor:
        """Return the model that was packed against the base.

        Raises :class:`FedalignError` for anything else, before memory is taken for more numbers than a model has.
        """
        reader, size = _Reader(memoryview(data)), len(self.initial)
        dtype, end = self.initial.dtype, self.trainable
        below = None if base is None else self._rest(base)
        if self.transport == "exact" or base is None:
            against = None if base is None or below is None else torch.cat([base[:end], below])
            moving = _numbers(reader.words(size - self.frozen, dtype.itemsize), against, dtype)
        else:
            (exponent,) = _HEAD.unpack(reader.take(_HEAD.size))
            half = torch.from_numpy(reader.words(end, 2).view(np.int16)).view(_HALF[self.transport])
            rest = _numbers(reader.words(size - end - self.frozen, dtype.itemsize), below, dtype)
            moving = torch.cat([self._sum(base, half, exponent), rest])
        reader.end()
        return torch.cat([moving[:end], self.initial[end : end + self.frozen], moving[end:]])

    def _rest(self, model: torch.Tensor) -> torch.Tensor:
        return model[self.trainable + self.frozen :]

    def _codes(self, model: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Round the difference to 16 bits. float16 has few exponents, so its unit is a power of two that fits."""
        change = model[: self.trainable] - base[: self.trainable]
        if self.transport == "bfloat16":
            return change.to(torch.bfloat16), 0
        largest = float(change.abs().max()) if len(change) else 0.0
        exponent = int(np.clip(np.frexp(largest)[1] - 15, -120, 120)) if np.isfinite(largest) and largest else 0
        return torch.ldexp(change, torch.tensor(-exponent)).to(torch.float16), exponent

    def _sum(self, base: torch.Tensor, codes: torch.Tensor, exponent: int) -> torch.Tensor:
        change = codes.to(base.dtype)
        return base[: self.trainable] + (torch.ldexp(change, torch.tensor(exponent)) if exponent else change)

    def _planes(self, words: npt.NDArray[np.unsignedinteger]) -> Iterator[bytes]:
        for plane in words.view(np.uint8).reshape(-1, words.itemsize).T:
            raw = plane.tobytes()
            deflated = _deflated(raw) if self.compress else raw
            smaller = len(deflated) < len(raw)
            yield _PLANE.pack(smaller, len(deflated) if smaller else len(raw))
            yield deflated if smaller else raw


def _deflated(raw: bytes) -> bytes:
    """Deflate bytes, or return them as they are if a sample from the middle shows that it does not pay.

    Differences of numbers have no words that repeat, so that coding each byte by how frequent it is gives the smallest
    result, in half the time; where nearly all are zero, it is coding runs.
    """
    at = max(0, (len(raw) - _SAMPLE) // 2)
    sample = raw[at : at + _SAMPLE]
    sizes = {strategy: len(_deflate(sample, strategy)) for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)}
    best = min(sizes, key=sizes.__getitem__)
    return _deflate(raw, best) if sizes[best] < 0.99 * len(sample) else raw


def _deflate(raw: bytes, strategy: int) -> bytes:
    made = zlib.compressobj(1, strategy=strategy)
    return made.compress(raw) + made.flush()


def closeness(model: torch.Tensor, base: torch.Tensor) -> float:
    """Return how many bits the differences of two models have on average, by a sample: fewer are cheaper to send.

    >>> model = torch.linspace(1, 2, 1000)
    >>> closeness(model, model), closeness(model, model * (1 + 1e-6)) < 8 < closeness(model, model.flip(0))
    (0.0, True)
    """
    step = max(1, len(model) // 4096)
    words = _words(model[::step].contiguous(), base[::step].contiguous())
    return float(np.log2(1.0 + words.astype(np.float64)).mean()) if len(words) else 0.0


def _ordered(model: torch.Tensor) -> npt.NDArray[np.signedinteger]:
    """Return integers that are in the order of the numbers; neighbours differ by one."""
    kind = _INTEGERS[model.dtype.itemsize]
    return _turned(model.detach().cpu().contiguous().view(kind).numpy())


def _turned(bits: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    """Turn the order of the negative ones; twice is as before."""
    largest = bits.dtype.type(np.iinfo(bits.dtype).max)
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & largest)


def _words(model: torch.Tensor, base: torch.Tensor | None) -> npt.NDArray[np.unsignedinteger]:
    """Return the differences as whole numbers from 0 on: 0, −1, 1, −2, 2, … are 0, 1, 2, 3, 4."""
    numbers = _ordered(model)
    if base is not None:
        with np.errstate(over="ignore"):
            numbers = numbers - _ordered(base)
    last = 8 * numbers.itemsize - 1
    return ((numbers << 1) ^ (numbers >> last)).view(f"u{numbers.itemsize}")


def _numbers(words: npt.NDArray[np.unsignedinteger], base: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    signed = f"i{words.itemsize}"
    numbers = (words >> 1).view(signed) ^ -(words & 1).view(signed)
    if base is not None:
        with np.errstate(over="ignore"):
            numbers = numbers + _ordered(base)
    return torch.from_numpy(_turned(numbers)).view(dtype)


class _Reader:
    """Reads planes, and never takes memory for more than is expected."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise FedalignError(f"its model ends after {len(self._data)} bytes")
        self._at += count
        return part

    def words(self, count: int, itemsize: int) -> npt.NDArray[np.unsignedinteger]:
        """Return so many numbers, plane by plane."""
        planes = np.empty((count, itemsize), np.uint8)
        for i in range(itemsize):
            deflated, length = _PLANE.unpack(self.take(_PLANE.size))
            if deflated not in (0, 1) or (not deflated and length != count):
                raise FedalignError(f"its model has a part of {length} bytes in place of {count}")
            part = self.take(length)
            planes[:, i] = np.frombuffer(_inflated(part, count) if deflated else part, np.uint8)
        return planes.view(f"u{itemsize}").reshape(count)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._data):
            raise FedalignError(f"its model has {len(self._data) - self._at} bytes too many")


def _inflated(part: memoryview, count: int) -> bytes:
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(part, count + 1)  # not more, whatever the sender packed
    except zlib.error as error:
        raise FedalignError("its model cannot be unpacked") from error
    if len(raw) != count or not inflate.eof or inflate.unused_data:
        raise FedalignError("its model does not unpack to the expected size")
    return raw
