"""A stranger's bytes in place of a model: refused with a sentence, whatever they are."""

import contextlib
import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.flower.wire import get_model, get_models, put_model

SIZE = 5


def message(data, dtype="float32", shape=(SIZE,)):
    return RecordDict({"model": ArrayRecord({"flat": Array(dtype, shape, "numpy.ndarray", data)})})


def saved(array, save=np.save):
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def header(text):
    words = text.encode()
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words


GOOD = saved(np.arange(SIZE, dtype=np.float32))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04junk",
        saved(np.zeros(SIZE, np.float32), np.savez),
        GOOD[:-1],
        GOOD[:20],
        GOOD + b"more",
        saved(np.zeros(SIZE, np.float64)),
        saved(np.zeros(SIZE + 1, np.float32)),
        saved(np.zeros((2, SIZE), np.float32).T),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000, 5), }\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 5), }\n"),
        header("{'descr': (((("),
        header("(" * 9000),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (5,), }\n") + b"pickle",
    ],
)
def test_what_is_no_model_is_refused(data):
    with pytest.raises(fa.FedalignError, match="its model"):
        get_model(message(data), SIZE, torch.float32)


@given(st.binary(max_size=300), st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
def test_mutated_replies_are_read_or_refused(noise, start, end):
    data = GOOD[:start] + noise + GOOD[end:]
    with contextlib.suppress(fa.FedalignError):  # anything else would end the server
        assert get_models(message(data), SIZE, torch.float32).shape[1] == SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_models_come_back(dtype):
    for models in (torch.randn(SIZE).to(dtype), torch.randn(3, SIZE).to(dtype)):
        content = RecordDict()
        put_model(content, models)
        assert torch.equal(get_models(content, SIZE, dtype), models.reshape(-1, SIZE))


def test_a_float32_array_is_no_bfloat16_model():
    with pytest.raises(fa.FedalignError, match="its model is of type float32, not int16"):
        get_model(message(GOOD), SIZE, torch.bfloat16)
