"""What is packed comes back the same, in type and bits; what cannot be is refused by name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from torch import nn

from resilient.errors import CheckpointCorrupt, ConfigError
from resilient.state.encoding import check_tensor, decode, encode, pack, unpack


def round_trip(value):
    tensors = {}

    def put(key, tensor):
        for known, other in tensors.items():
            if other is tensor:
                return known
        tensors[key] = tensor
        return key

    node = decode(encode(pack(value, "state", put)))
    return unpack(node, lambda key, kind: tensors[key].clone())


def test_plain_values_keep_their_types():
    value = {
        "none": None,
        "flags": (True, False),
        0: "an int key",
        2**40: -(2**63),
        "huge": 2**127 + 1,
        "tiny": -(2**100),
        "floats": [0.1, -0.0, math.inf, 5e-324],
        "bytes": b"\x00\xff",
        "nested": {"betas": (0.9, (0.999,)), "empty": [(), {}, []], (1, "a"): {3: 4}},
        "sets": [{1, 2}, frozenset({"x"})],
        "complex": 1 - 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)  # types of keys and containers, -0.0
    assert math.isnan(round_trip([math.nan])[0])


def test_shallow_dict_of_big_integers():
    value = {"state": 2**127, "low": 1, 5: None}
    assert round_trip(value) == value
    assert round_trip({"a": {"state": 2**127}, "b": [{"x": 2**64}]}) == {
        "a": {"state": 2**127},
        "b": [{"x": 2**64}],
    }


def test_containers_of_collections():
    value = [
        OrderedDict(b=1, a=2),
        Counter({30: 1, 80: 2}),  # MultiStepLR's milestones
        deque([1, 2], maxlen=5),
        defaultdict(list, {"a": [1]}),
    ]
    back = round_trip(value)
    assert [type(item) for item in back] == [type(item) for item in value]
    assert back == value and list(back[0]) == ["b", "a"]
    assert back[2].maxlen == 5 and back[3]["new"] == []


def test_numpy_values():
    array = numpy.arange(6, dtype=">i2").reshape(2, 3)
    back = round_trip(
        {"array": array, "empty": numpy.zeros((0, 3)), "0d": numpy.array(2.5), "s": numpy.int64(7)}
    )
    assert back["array"].dtype == array.dtype and (back["array"] == array).all()
    assert back["array"].flags.writeable
    assert back["empty"].shape == (0, 3) and back["0d"].shape == ()
    assert type(back["s"]) is numpy.int64 and back["s"] == 7


def test_generator_states():
    generator = numpy.random.default_rng(3)
    state = round_trip(generator.bit_generator.state)  # integers of 128 bits
    assert state == generator.bit_generator.state


def test_a_tensor_met_twice_stays_one():
    tensor = torch.ones(3)
    keys = []

    def put(key, value):
        keys.append(key)
        return keys[0]

    node = pack({"a": tensor, "b": [tensor]}, "ema", put)
    assert keys == ["ema.a", "ema.b.0"]
    found = []
    unpack(node, lambda key, kind: found.append((key, kind)))
    assert found == [("ema.a", "cpu"), ("ema.a", "cpu")]


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"fn": print}, "sched.fn", "builtin_function_or_method"),
        ({"a": [1, {"b": object()}]}, "sched.a.1.b", "builtins.object"),
        ({"m": nn.Linear(1, 1)}, "sched.m", "Linear"),
        ({"o": numpy.array([object()])}, "sched.o", "ndarray"),
        ({"d": defaultdict(lambda: 0)}, "sched.d", "defaultdict"),
        ([True, range(3)], "sched.1", "range"),
    ],
)
def test_what_cannot_be_encoded_is_named(value, path, kind):
    with pytest.raises(ConfigError) as caught:
        pack(value, "sched", lambda key, tensor: key)
    text = str(caught.value)
    assert text.startswith(path + " ") and kind in text and "\n" not in text


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        nn.LazyLinear(2).weight,
    ],
)
def test_tensors_that_are_not_their_bytes_are_refused(tensor):
    with pytest.raises(ConfigError, match=r"model\.w"):
        check_tensor(tensor, "model.w")


def test_damaged_bytes():
    with pytest.raises(CheckpointCorrupt):
        decode(b"\xc1")
    with pytest.raises(CheckpointCorrupt):
        unpack([99, 1], lambda key, kind: None)
    with pytest.raises(CheckpointCorrupt):
        tag = pack(torch.float32, "", None)[0]
        unpack([tag, "load"], lambda key, kind: None)  # torch.load is no dtype
