"""Timelines as execution traces of MLCommons Chakra, which ASTRA-sim and other simulators replay.

A trace is a file a device: a ``GlobalMetadata``, then a ``Node`` for each task of the device, each
with its length in front. Names and types of attributes are those that Chakra's and ASTRA-sim's
feeders read (github.com/mlcommons/chakra, ``src/feeder``; github.com/astra-sim/astra-sim,
``astra-sim/workload/Workload.cc``). The schema of the messages has the fields that we write, with
the numbers and types of ``schema/protobuf/et_def.proto`` in github.com/mlcommons/chakra (May 2026).
Readers skip the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COMPUTE, RECVS, SENDS, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_export import names
from pipesim.utils.files import check_no_others, check_path, write_text, write_whole
from pipesim.utils.packages import import_extra

# Messages


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


# Nodes of tasks

__all__ = ["NODE_TYPES", "save"]

#: Type of the node of each operation.
NODE_TYPES: dict[Op, NodeType] = {
    **dict.fromkeys(COMPUTE, NodeType.COMP_NODE),
    **dict.fromkeys(SENDS, NodeType.COMM_SEND_NODE),
    **dict.fromkeys(RECVS, NodeType.COMM_RECV_NODE),
    **dict.fromkeys(COLLECTIVES, NodeType.COMM_COLL_NODE),
    Op.OFFLOAD: NodeType.MEM_STORE_NODE,
    Op.RELOAD: NodeType.MEM_LOAD_NODE,
}
#: Type of the communication of each collective; of a sharded stage, REDUCE_GRAD is another one.
_COLLECTIVE_TYPES: dict[Op, CollectiveType] = {
    Op.REDUCE_GRAD: CollectiveType.ALL_REDUCE,
    Op.REDUCE_TIED: CollectiveType.ALL_REDUCE,
    Op.GRAD_NORM: CollectiveType.ALL_REDUCE,
    Op.UNSHARD: CollectiveType.ALL_GATHER,
    Op.ALL_TO_ALL: CollectiveType.ALL_TO_ALL,
}
_SCHEMA = "1.0.2-chakra.1.0.0"
#: First number that a signed integer of 64 bits cannot have.
_LARGEST = 2**63


def save(prefix: Path | str, timeline: Timeline) -> list[Path]:
    """Write one Chakra execution trace a device, ``prefix.<device>.et``; return the files.

    A task is a node with the task's id, and the text form of its action as name:

    =================== ================================ ========================================
    operations          type                             attributes
    =================== ================================ ========================================
    F, B, I, W, R, STEP ``COMP_NODE``                    ``num_ops``, ``tensor_size`` (0: unknown)
    and the like
    SEND_F, SEND_B      ``COMM_SEND_NODE``               ``comm_src``, ``comm_dst``, ``comm_tag``,
                                                         ``comm_size``
    RECV_F, RECV_B      ``COMM_RECV_NODE``               as those of its SEND
    REDUCE_GRAD and     ``COMM_COLL_NODE``               ``comm_type``, ``comm_size``, ``pg_name``
    other collectives
    OFFLOAD, RELOAD     ``MEM_STORE_NODE``,              ``tensor_size``
                        ``MEM_LOAD_NODE``
    =================== ================================ ========================================

    - Every node has ``is_cpu_op`` (False), ``start_time_micros`` and ``duration_micros``. They are
      whole microseconds, rounded: the format has no fractions.
    - ``data_deps`` are the task's dependencies; ``ctrl_deps`` the task before it on its stream.
      A RECV needs its SEND, which has the same tag, and no dependency says so. Feeders that read
      ``data_deps`` alone issue ready nodes in the order of their ids, which is the issue order.
    - Bytes are those of `Timeline.nbytes`. ASTRA-sim's networks refuse messages of 0 bytes: give
      `Costs` their ``output_bytes``.
    - Devices of a collective are a group. If there are any, ``prefix.comm_groups.json`` lists the
      devices of each, by its ``pg_name``, for ASTRA-sim's ``--comm-group-configuration``. A
      collective within one device is a ``COMP_NODE``.
    - Rendezvous, hosts, and the overlap of a bucket of gradients with its backward have no form.

    Parameters
    ----------
    prefix
        Folder and beginning of the names of the files, such as ``"traces/1f1b"``.
    timeline
        A timeline whose tasks all ran.

    Returns
    -------
    list of pathlib.Path
        Files of the traces, by device.

    Raises
    ------
    TimelineError
        For tasks that did not run, and times or bytes beyond 64 bits.
    """
    path = check_path("prefix", prefix, "write")
    if not path.name or str(prefix).endswith(("/", ".")):
        raise ArgumentError(f"prefix must end in the beginning of a name, got {str(prefix)!r}")
    if not isinstance(timeline, Timeline):
        raise ArgumentError(f"a trace is of a Timeline, got {type(timeline).__name__}")
    nodes = _Nodes(timeline)
    files = [path.with_name(f"{path.name}.{k}.et") for k in range(timeline.n_devices)]
    groups_file = path.with_name(f"{path.name}.comm_groups.json")
    own = {file.name for file in files} | ({groups_file.name} if nodes.groups else set())
    pattern = rf"{re.escape(path.name)}\.([0-9]+\.et|comm_groups\.json)"
    check_no_others(path.parent, pattern, own, "ASTRA-sim")
    for device, file in enumerate(files):
        data = b"".join(nodes.of_device(device))
        write_whole(file, partial(Path.write_bytes, data=data))
    if nodes.groups:
        listed = {name: list(devices) for devices, name in nodes.groups.items()}
        write_text(groups_file, json.dumps(listed) + "\n")
    return files


@dataclass(frozen=True, eq=False)
class _Nodes:
    timeline: Timeline

    @property
    def graph(self) -> TaskGraph:
        return self.timeline.graph

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        timeline = self.timeline
        timeline.check_complete("a Chakra trace")
        begin = float(min(0.0, timeline.start.min(initial=0.0)))
        return (
            _whole("start (us)", (timeline.start - begin) * 1e6),
            _whole("duration (us)", (timeline.end - timeline.start) * 1e6),
            _whole("number of bytes", timeline.nbytes),
        )

    @cached_property
    def _group_of_task(self) -> dict[int, tuple[int, ...]]:
        """Devices of the collective of each task that is a node of a collective.

        Of several members on a device, the first is the node. Collectives within a device have
        none.
        """
        groups: dict[int, tuple[int, ...]] = {}
        for number in range(len(self.graph.collectives)):
            members = self.graph.collectives[number]
            devices, first = np.unique(self.graph.device[members], return_index=True)
            if len(devices) > 1:
                groups |= dict.fromkeys(members[first].tolist(), tuple(devices.tolist()))
        return groups

    @cached_property
    def groups(self) -> dict[tuple[int, ...], str]:
        """Name of each group of devices; ASTRA-sim takes "0" for all devices."""
        groups = sorted(set(self._group_of_task.values()))
        return {devices: str(number) for number, devices in enumerate(groups, start=1)}

    def of_device(self, device: int) -> Iterator[bytes]:
        """Yield the metadata and the nodes of a device, as they are in its file."""
        kinds, graph = messages(), self.graph
        metadata = {"schema": _SCHEMA, "producer": "pipesim", "timeline": self.timeline.name}
        yield delimited(
            kinds.metadata(
                version="1.0.0",
                attr=[kinds.attribute(name=k, string_val=text) for k, text in metadata.items()],
            )
        )
        start, duration, _ = self._columns
        for task in np.flatnonzero(graph.device == device).tolist():
            before = int(graph.queue_predecessor[task])
            yield delimited(
                kinds.node(
                    id=task,
                    name=self._names[task],
                    type=self._type(task),
                    ctrl_deps=[before] if before >= 0 else [],
                    data_deps=graph.dependencies[task].tolist(),
                    start_time_micros=int(start[task]),
                    duration_micros=int(duration[task]),
                    attr=self._attributes(task),
                )
            )

    @cached_property
    def _names(self) -> list[str]:
        return names(self.timeline)

    def _type(self, task: int) -> NodeType:
        kind = NODE_TYPES[Op(self.graph.op[task])]
        alone = kind is NodeType.COMM_COLL_NODE and task not in self._group_of_task
        return NodeType.COMP_NODE if alone else kind

    def _attributes(self, task: int) -> list[Any]:
        attribute, kind, graph = messages().attribute, self._type(task), self.graph
        nbytes = int(self._columns[2][task])
        rows = [attribute(name="is_cpu_op", bool_val=False)]
        if kind in (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE):
            pair = int(graph.pair[task])
            ends = (task, pair) if kind is NodeType.COMM_SEND_NODE else (pair, task)
            source, target = (int(graph.device[end]) for end in ends)
            rows += [
                attribute(name="comm_src", int32_val=source),
                attribute(name="comm_dst", int32_val=target),
                attribute(name="comm_tag", int32_val=ends[0]),
                attribute(name="comm_size", int64_val=nbytes),
            ]
        elif kind is NodeType.COMM_COLL_NODE:
            rows += [
                attribute(name="comm_type", int64_val=self._collective_type(task)),
                attribute(name="comm_size", int64_val=nbytes),
                attribute(name="pg_name", string_val=self.groups[self._group_of_task[task]]),
            ]
        else:
            rows.append(attribute(name="tensor_size", uint64_val=nbytes))
            if kind is NodeType.COMP_NODE:
                rows.append(attribute(name="num_ops", int64_val=0))
        return rows

    def _collective_type(self, task: int) -> CollectiveType:
        op = Op(self.graph.op[task])
        if op == Op.REDUCE_GRAD and self.graph.optimizer_shares[self.graph.stage[task]] > 1:
            return CollectiveType.REDUCE_SCATTER
        return _COLLECTIVE_TYPES[op]


def _whole(what: str, values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return rounded values; raise `TimelineError` for one beyond 64 bits."""
    largest = float(values.max(initial=0.0))
    if not largest < _LARGEST:
        raise TimelineError(f"the {what} of a task is {largest:g}; a Chakra trace has 64 bits")
    return np.round(values).astype(np.int64)
