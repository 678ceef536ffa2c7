"""Files of a projection in a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.run_directory import (
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipesim.errors import PipeError, RunDirectoryError
from pipesim.models.layers import Layers
from pipesim.planning.cluster import Cluster
from pipesim.utils.files import check_path

if TYPE_CHECKING:
    from pipeexec.projection.projection import Projection


#: Files of the columns of the layers, and of the activation bytes of stages.
_LAYERS, _JOINT = "layers.csv", "joint.csv"
#: Key of the record with the other values.
_KEY = "projection"


def save_parts(path: Path | str, projection: Projection, record: Mapping[str, Any] | None) -> None:
    """Write the run directory of a projection; see `Projection.save`."""
    from pipesim.utils.packages import pandas as pd

    values = {
        "modules": projection.modules,
        "n_blocks": projection.n_blocks,
        "cluster": projection.cluster.to_dict(),
        "microbatch_size": projection.microbatch_size,
        "device": projection.device,
        "launch": projection.launch,
        "spread": projection.spread,
        "tied": projection.tied,
    }
    with write_directory(
        check_path("path", path, "write"),
        {"command": command(), **checked_record(record), _KEY: values},
    ) as folder:
        names = [", ".join(names) for names in projection.modules]
        columns = {"layer": names, **projection.layers.columns}
        pd.DataFrame(columns).to_csv(folder / _LAYERS, index=False)
        joint = projection.layers.joint_activation_bytes
        pd.DataFrame(joint).to_csv(folder / _JOINT, index=False, header=False)


def load_parts(path: Path | str) -> dict[str, Any]:
    """Return the parameters of `Projection` from a run directory; see `Projection.load`."""
    from pipesim.utils.packages import pandas as pd

    path = check_path("path", path)
    record = read_record(path)
    values = record.get(_KEY)
    if not isinstance(values, Mapping):
        raise RunDirectoryError(
            f"{path} holds no projection; write one with Projection.save, and read other runs with "
            "pipeexec.load_run or pipeexec.Profile.load"
        )
    try:
        joint = pd.read_csv(listed_file(path, record, _JOINT), header=None).to_numpy(float).tolist()
        columns = Layers.read(listed_file(path, record, _LAYERS)).columns
        return {
            "layers": Layers(columns, "projection", joint),
            "modules": tuple(tuple(map(str, names)) for names in values["modules"]),
            "n_blocks": tuple(map(int, values["n_blocks"])),
            "cluster": Cluster.from_dict(values["cluster"]),
            "microbatch_size": int(values["microbatch_size"]),
            "device": str(values["device"]),
            "launch": float(values["launch"]),
            "spread": tuple(map(float, values["spread"])),
            "tied": tuple((tuple(map(int, a)), float(b)) for a, b in values["tied"]),
        }
    except (OSError, KeyError, TypeError, ValueError, PipeError) as error:
        raise RunDirectoryError(
            f"{path} holds no whole projection: {type(error).__name__}: {error!s:.200}; make it "
            "again with pipeexec.project"
        ) from error
