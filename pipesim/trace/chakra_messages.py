"""Messages of MLCommons Chakra execution traces (``schema/protobuf/et_def.proto``).

The schema has the fields that we write, with the numbers and types of ``et_def.proto`` in
github.com/mlcommons/chakra (May 2026). Readers skip the others.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from pipesim.utils.extras import import_extra


class NodeType(IntEnum):
    """Type of a node."""

    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


class CollectiveType(IntEnum):
    """Value of the attribute ``comm_type`` of a collective."""

    ALL_REDUCE = 0
    ALL_GATHER = 2
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7


class Messages(NamedTuple):
    """Classes of messages of protobuf."""

    node: Any
    attribute: Any
    metadata: Any


#: Number, type and label of each field, by name; `TYPE_...` and `LABEL_...` of protobuf.
_FIELDS: dict[str, dict[str, tuple[int, str, str]]] = {
    "AttributeProto": {
        "name": (1, "STRING", "OPTIONAL"),
        "double_val": (3, "DOUBLE", "ONE_OF"),
        "int32_val": (7, "INT32", "ONE_OF"),
        "int64_val": (9, "INT64", "ONE_OF"),
        "uint64_val": (13, "UINT64", "ONE_OF"),
        "bool_val": (27, "BOOL", "ONE_OF"),
        "string_val": (29, "STRING", "ONE_OF"),
    },
    "GlobalMetadata": {
        "version": (1, "STRING", "OPTIONAL"),
        "attr": (2, "AttributeProto", "REPEATED"),
    },
    "Node": {
        "id": (1, "UINT64", "OPTIONAL"),
        "name": (2, "STRING", "OPTIONAL"),
        "type": (3, "NodeType", "OPTIONAL"),
        "ctrl_deps": (4, "UINT64", "REPEATED"),
        "data_deps": (5, "UINT64", "REPEATED"),
        "start_time_micros": (6, "UINT64", "OPTIONAL"),
        "duration_micros": (7, "UINT64", "OPTIONAL"),
        "attr": (10, "AttributeProto", "REPEATED"),
    },
}
_PACKAGE = "ChakraProtoMsg"


@cache
def messages() -> Messages:
    """Return the classes of messages."""
    descriptor_pb2, descriptor_pool, message_factory = (
        import_extra(f"google.protobuf.{module}", "chakra", "a Chakra trace")
        for module in ("descriptor_pb2", "descriptor_pool", "message_factory")
    )
    file = descriptor_pb2.FileDescriptorProto(
        name="pipesim_chakra.proto", package=_PACKAGE, syntax="proto3"
    )
    # The first value of an enumeration of proto3 is 0, which no node of ours has.
    values = {"INVALID_NODE": 0, **{kind.name: kind.value for kind in NodeType}}
    enumeration = file.enum_type.add(name="NodeType")
    for name, number in values.items():
        enumeration.value.add(name=name, number=number)
    for message, columns in _FIELDS.items():
        descriptor = file.message_type.add(name=message)
        for name, (number, kind, label) in columns.items():
            field = descriptor.field.add(name=name, number=number)
            _set_kind(field, kind)
            if label == "ONE_OF":  # a value of 0 is written too
                if not descriptor.oneof_decl:
                    descriptor.oneof_decl.add(name="value")
                field.oneof_index, label = 0, "OPTIONAL"
            field.label = getattr(field, f"LABEL_{label}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return Messages(
        *(
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in ("Node", "AttributeProto", "GlobalMetadata")
        )
    )


def _set_kind(field: Any, kind: str) -> None:
    """Set the type of a field: a scalar of protobuf, the enumeration, or a message."""
    if kind == "NodeType":
        field.type, field.type_name = field.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    elif kind in _FIELDS:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind}")


def delimited(message: Any) -> bytes:
    """Return a message with its length in front, as a varint."""
    data: bytes = message.SerializeToString()
    length, prefix = len(data), bytearray()
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data
