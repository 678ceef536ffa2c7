"""Timelines as Arrow tables, and as Parquet files, which keep every bit of every column.

A table has the columns of `Timeline.save`. Its schema has the settings of the graph, as JSON under
the key ``pipesim``. A file has a checksum of all its bytes there, computed with zeros in its own
place. So a file is checked before it is decoded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.errors import CapacityError, PipeError, TimelineError
from pipesim.timeline.tables import INTEGERS, SECONDS_AND_BYTES, SETTINGS, from_rows, to_rows
from pipesim.timeline.timeline import COLUMNS, Timeline
from pipesim.utils.files import check_content, check_path, read_bytes, write_whole
from pipesim.utils.packages import import_extra
from pipesim.utils.texts import checksum_mismatch, parse_json

if TYPE_CHECKING:
    import pandas as pd


_WHAT = "a timeline from"
#: Columns that are read.
_ALL = {*COLUMNS, *INTEGERS, *SECONDS_AND_BYTES}
#: First and last bytes of a Parquet file.
_MAGIC = b"PAR1"
#: Key of our JSON in the metadata of a schema.
_KEY = "pipesim"
_NO_DIGEST = "0" * 64
_DIGEST = re.compile(rb'"sha256": "([0-9a-f]{64})"')


def arrow_table(timeline: Timeline) -> Any:
    """Return a `pyarrow.Table` of all tasks, one row each, in order of their ids.

    Integers have 32 bits. Names of operations and streams are dictionaries. A time at which a task
    did not start or end is NaN.
    """
    pa = import_extra("pyarrow", "parquet", "an Arrow table")
    rows, settings = to_rows(timeline)
    columns = {}
    for name in map(str, rows):
        values = rows[name].to_numpy()
        if name in INTEGERS:
            columns[name] = pa.array(values, pa.int32())
        elif name in SECONDS_AND_BYTES:
            columns[name] = pa.array(values, pa.float64())
        else:
            columns[name] = pa.array(values, pa.string()).dictionary_encode()
    return pa.table(columns, metadata={_KEY: json.dumps({"settings": settings})})


def save(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline as Parquet; see `Timeline.save`."""
    path = check_path("path", path, "write")
    pq = import_extra("pyarrow.parquet", "parquet", "a Parquet file")
    pa = import_extra("pyarrow", "parquet", "a Parquet file")
    table, sink = arrow_table(timeline), pa.BufferOutputStream()
    # The schema of Arrow would have no use: columns are converted when they are read.
    with pq.ParquetWriter(sink, table.schema, store_schema=False, compression="zstd") as writer:
        writer.write_table(table)
        metadata = json.loads(table.schema.metadata[_KEY.encode()])
        writer.add_key_value_metadata({_KEY: json.dumps({"sha256": _NO_DIGEST, **metadata})})
    data = bytes(sink.getvalue())
    digest = hashlib.sha256(data).hexdigest()
    signed = data.replace(_NO_DIGEST.encode(), digest.encode())
    write_whole(path, lambda file: file.write_bytes(signed))


def load(path: Path | str, *, costs: Costs | None, name: str) -> Timeline:
    """Read a timeline from a Parquet file; see `Timeline.load`."""
    path = check_path("path", path)
    data = read_bytes(path, _WHAT, TimelineError)
    import_extra("pyarrow", "parquet", "a Parquet file")
    try:
        _check_bytes(data)
        rows, settings = _decoded(data, path)
        return from_rows(rows, settings, costs=costs, name=name or path.stem)
    except CapacityError:
        raise
    except (PipeError, ValueError) as error:
        raise TimelineError(f"{path} is no whole timeline: {error}") from error


def read_frame(data: bytes, path: Path, what: str) -> pd.DataFrame:
    """Return the table in the bytes of any Parquet file; ``what`` it is, as an error says."""
    pq = import_extra("pyarrow.parquet", "parquet", "a Parquet file")
    pa = import_extra("pyarrow", "parquet", "a Parquet file")
    with _arrow_errors(pa, path, what):
        metadata = pq.read_metadata(pa.BufferReader(data))
        schema = metadata.schema.to_arrow_schema()
        check_content(_decoded_bytes(metadata, schema.names), path, what)
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts) as file:
            frame: pd.DataFrame = file.read().to_pandas()  # texts are categories, each held once
    return frame


@contextmanager
def _arrow_errors(pa: Any, path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except CapacityError:
        raise
    except MemoryError as error:  # also that of pyarrow
        raise CapacityError(
            f"cannot read {what} {path}: it does not fit in memory; give a smaller file, or run "
            "where there is more memory"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise TimelineError(" ".join(str(error).split())) from error


def _check_bytes(data: bytes) -> None:
    """Raise `TimelineError` unless these are the bytes of a Parquet file that `save` made."""
    if not data.startswith(_MAGIC):
        raise TimelineError("it is no Parquet file")
    if not data.endswith(_MAGIC) or len(data) < 3 * len(_MAGIC):
        raise TimelineError("its end was cut; write it again")
    digests = _DIGEST.findall(data)
    if len(digests) != 1:
        raise TimelineError(
            "no Timeline.save wrote this Parquet file, or another program wrote it again; write "
            "changed tables as CSV, with the columns of Timeline.save"
        )
    digest = digests[0]
    if hashlib.sha256(data.replace(digest, _NO_DIGEST.encode())).hexdigest() != digest.decode():
        raise TimelineError(checksum_mismatch("it", "write the changed table as CSV"))


def _decoded(data: bytes, path: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the table and the settings in the bytes of a file.

    Few bytes may be many rows, and a row may have a long text. So the sizes are checked before
    anything is decoded, and those of texts before they are repeated.
    """
    from pipesim.utils.packages import pandas as pd

    pq = import_extra("pyarrow.parquet", "parquet", "a Parquet file")
    pa = import_extra("pyarrow", "parquet", "a Parquet file")
    with _arrow_errors(pa, path, _WHAT):
        metadata = pq.read_metadata(pa.BufferReader(data))
        names = _checked_columns(pa, metadata.schema.to_arrow_schema())
        check_content(_decoded_bytes(metadata, names), path, _WHAT)
        texts = [name for name in names if name not in (*INTEGERS, *SECONDS_AND_BYTES)]
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts) as file:
            table = file.read(columns=names)
        columns = {name: _values(pa, name, table.column(name), path) for name in names}
    rows = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows, name="task"))
    return rows, _settings(table.schema.metadata or {})


def _checked_columns(pa: Any, schema: Any) -> list[str]:
    """Return the names of the columns to read; raise unless each has its type, once."""
    names = [name for name in schema.names if name in _ALL]
    for name in names:
        kind = schema.field(schema.names.index(name)).type
        wanted, is_valid = (
            ("int32", pa.types.is_integer(kind))
            if name in INTEGERS
            else ("double", pa.types.is_floating(kind))
            if name in SECONDS_AND_BYTES
            else ("string", pa.types.is_string(kind))
        )
        if not is_valid or names.count(name) > 1:
            raise TimelineError(f"column {name!r} has type {kind}, allowed is {wanted}, once")
    return names


def _decoded_bytes(metadata: Any, names: Sequence[str]) -> int:
    """Return the bytes of some columns: 8 a value, or those of their pages if these are more."""
    n_rows, n_bytes = metadata.num_rows, 0
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    for group in groups:
        for place in range(group.num_columns):
            column = group.column(place)
            if column.path_in_schema in names:
                n_bytes += max(8 * group.num_rows, column.total_uncompressed_size)
    return int(max(n_bytes, 8 * n_rows * len(names)))


def _values(pa: Any, name: str, column: Any, path: Path) -> Any:
    """Return the values of a column as an array; raise `TimelineError` if one is missing."""
    if column.null_count:
        raise TimelineError(f"column {name!r} has no value in some rows")
    if name in INTEGERS or name in SECONDS_AND_BYTES:
        kind = pa.int64() if name in INTEGERS else pa.float64()
        return np.ascontiguousarray(column.cast(kind).to_numpy())
    array = column.unify_dictionaries().combine_chunks()
    texts, numbers = array.dictionary.to_pylist(), array.indices.to_numpy()
    check_content(int(np.array([*map(len, texts), 0])[numbers].sum()), path, _WHAT)
    return np.array([*texts, None], object)[numbers]


def _settings(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    content = parse_json(metadata.get(_KEY.encode(), b"{}"))
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict) or not all(
        name in SETTINGS and isinstance(text, str) for name, text in settings.items()
    ):
        raise TimelineError(f"its metadata {_KEY!r} has no valid settings; write it again")
    return settings
