"""Read Chakra execution traces without protobuf: its wire format, parsed by hand."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: Field numbers of et_def.proto.
_DOUBLE, _BOOL, _STRING = 3, 27, 29


@dataclass
class Node:
    """A node of a trace."""

    id: int = 0
    name: str = ""
    type: int = 0
    ctrl_deps: list[int] = field(default_factory=list)
    data_deps: list[int] = field(default_factory=list)
    start_time_micros: int = 0
    duration_micros: int = 0
    attr: dict[str, object] = field(default_factory=dict)


def read_trace(path: Path) -> tuple[dict[str, object], list[Node]]:
    """Return the attributes of the metadata, and the nodes, of a file."""
    first, *others = _messages(path.read_bytes())
    attributes = dict(_attribute(value) for number, value in _fields(first) if number == 2)
    version = next(value for number, value in _fields(first) if number == 1)
    return {"version": version.decode(), **attributes}, [_node(data) for data in others]


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7


def _messages(data: bytes) -> Iterator[bytes]:
    """Yield messages, each with its length in front."""
    place = 0
    while place < len(data):
        length, place = _varint(data, place)
        assert place + length <= len(data), "the last message was cut"
        yield data[place : place + length]
        place += length


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == _VARINT:
            value, place = _varint(data, place)
        else:
            length = {_FIXED64: 8, _FIXED32: 4}.get(wire)
            if length is None:
                assert wire == _BYTES, wire
                length, place = _varint(data, place)
            value = data[place : place + length]
            place += length
        yield number, value


def _attribute(data: bytes) -> tuple[str, object]:
    """Return name and value; an attribute without a value is an error, as it is to feeders."""
    (number, value), *values = _fields(data)
    assert number == 1
    ((kind, raw),) = values
    if kind == _BOOL:
        return value.decode(), bool(raw)
    if kind == _STRING:
        return value.decode(), raw.decode()
    if kind == _DOUBLE:
        return value.decode(), struct.unpack("<d", raw)[0]
    return value.decode(), raw - 2**64 if raw >= 2**63 else raw


def _node(data: bytes) -> Node:
    node = Node()
    names = {1: "id", 3: "type", 6: "start_time_micros", 7: "duration_micros"}
    for number, value in _fields(data):
        if number in names:
            setattr(node, names[number], value)
        elif number == 2:
            node.name = value.decode()
        elif number in (4, 5):  # packed
            place, deps = 0, node.ctrl_deps if number == 4 else node.data_deps
            while place < len(value):
                dep, place = _varint(value, place)
                deps.append(dep)
        elif number == 10:
            name, content = _attribute(value)
            node.attr[name] = content
    return node
