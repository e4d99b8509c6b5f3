"""Everything that carries values carries every kind of value."""

import json

import msgspec
import pytest

from headway.backends.process.arena import take_inputs
from headway.backends.process.frames import Run
from headway.brokers.redis.wire import read_value
from headway.cli.trial import choose_inputs
from headway.core import values
from headway.core.tensors import Tensor, TensorHead, pack, rows_of
from headway.errors import SettingError
from headway.model import KIND, KIND_OF_LETTER, KINDS, Octets, Signature, TensorSpec, Value, ValueKind, kind_of

SAMPLES: dict[ValueKind, Value] = {
    ValueKind.TEXT: "a text",
    ValueKind.JSON: b'{"a":[1,2]}',
    ValueKind.BYTES: Octets(b"\xff\0"),
    ValueKind.TENSORS: pack([Tensor(TensorHead("x", "UINT8", (2, 2)), b"\1\2\3\4")]),
}


def test_there_is_a_sample_of_each_kind() -> None:
    assert set(SAMPLES) == set(ValueKind) == set(KIND)
    assert len(KIND_OF_LETTER) == len(KINDS) == len({one.type for one in KINDS})


@pytest.mark.parametrize("kind", ValueKind)
def test_a_value_tells_its_kind_and_comes_back_from_its_content(kind: ValueKind) -> None:
    value = SAMPLES[kind]
    facts = kind_of(value)
    assert facts.kind is kind
    assert KIND_OF_LETTER[facts.letter].of(values.octets(value)) == value


@pytest.mark.parametrize("kind", ValueKind)
def test_a_value_is_shown_named_and_told_from_all_others(kind: ValueKind) -> None:
    value = SAMPLES[kind]
    assert json.loads(values.as_json(value)) is not None
    assert values.shown(value)
    assert values.name_of(value)
    others = [values.canonical(other) for of, other in SAMPLES.items() if of is not kind]
    assert values.canonical(value) not in others


@pytest.mark.parametrize("kind", ValueKind)
def test_a_value_travels_to_the_broker_and_to_the_child(kind: ValueKind) -> None:
    value = SAMPLES[kind]
    assert read_value(msgspec.msgpack.decode(msgspec.msgpack.encode(value))) == value
    run = msgspec.msgpack.decode(msgspec.msgpack.encode(Run(1, [value])), type=Run)
    take_inputs(None, run, False)
    assert run.inputs == [value]


@pytest.mark.parametrize("kind", [one for one in ValueKind if one is not ValueKind.TEXT])
def test_a_trial_without_an_input_says_what_to_give(kind: ValueKind) -> None:
    with pytest.raises(SettingError, match="--input"):
        choose_inputs([], 1, Signature(kind, kind, inputs=(TensorSpec("x", "UINT8", (2,)),)))
    fit = 4 // rows_of(SAMPLES[kind])
    assert choose_inputs([], 4, Signature(kind, kind, SAMPLES[kind])) == [SAMPLES[kind]] * fit
