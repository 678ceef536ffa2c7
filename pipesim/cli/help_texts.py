"""Texts in the help of commands: examples, and files that the commands read."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from pipesim.calibration.measured_steps import known_columns
from pipesim.sweeps.settings import FLAT

_FILE = """\
A TOML file (--config) holds the same settings; options override it:

  devices = 4
  microbatches = 8
  recompute = "always"      # likewise all options of --help lowering, such as grad_sync
  # framework = "nemo_2025" # exchanges, and costs of a model, of a framework; or a table
  memory_limit = "80GiB"    # bytes that a device may hold, as a text or a number
  per = "device"            # costs are of all that a device holds, however many stages;
                            # "layers": of as many parts of the model, in order of its layers

  [costs]                   # the fields of pipesim.Costs: one value, or one a stage
  file = "costs.json"       # optional, beside this file; the keys below override it
  forward = 1e-3
  backward = [2e-3, 2e-3, 2e-3, 3e-3]
  output_bytes = 4194304
  network = { latency = 20e-6, bandwidth = 25e9 }    # or nodes, links, or a machine:
  # network = { preset = "dgx_h100", gpus_per_device = 8, efficiency = 0.8 }
  #                         # also nic_efficiency = 0.5, of NICs alone
  # network = { host = { latency = 10e-6, bandwidth = 25e9 } }    # for offload

  # [costs.transformer]     # in place of seconds and bytes: a model on GPUs
  # model = "llama3_8b"     # or sizes: hidden_size, n_layers, ...
  # gpu = "h100_sxm"        # or a file that pipesim calibrate --json wrote, beside this file;
  #                         # its factors of the network apply to a preset, but its efficiency
  #                         # only where the network has none
  # microbatch_size = 1     # likewise tensor_parallel, recompute, ... of Transformer.costs
  # layers_per_stage = "balanced"    # the default: for the devices of the schedule; "even";
  #                                  # or a list, or a layout string of Megatron

  [[schedule]]              # a table a schedule; it may override any setting above
  name = "gpipe"
  options = { backward_order = "forward" }

  [[schedule]]
  name = "1f1b"
  label = "1f1b, all kept"  # what tables and plots call it
  recompute = "never"

Where no schedule needs settings of its own, schedule = ["gpipe", "1f1b"] is enough.
Names on the command line pick tables by label or name, or else name further schedules.
A name may be a file, as orders.csv: a row a device, cells such as 0F0 and 0B0; or a grid
as text. It says how many devices and micro-batches there are. In a TOML file it is
beside that file.
"""
_SWEEP_FILE = """\
A TOML file (--config) holds settings as for pipesim compare, and the values to combine:

  devices = 4
  costs = { forward = 1e-3, backward = 2e-3 }

  [grid]                    # every combination; the last key varies fastest
  schedule = ["gpipe", "1f1b"]
  microbatches = [4, 8, 16]
  recompute = ["never", "always"]

Keys of a grid:

"""
_STEPS_FILE = """\
Columns of the file are seconds, the measured time of a step, and its settings:

  model                     a published model, such as llama3_8b; or the sizes of one:
                            hidden_size, n_layers, n_heads, sequence_length, vocabulary_size, ...
  microbatch_size, tensor_parallel, sequence_parallel, recompute, flash_attention,
  layers_per_stage, ...     arguments of Transformer.costs
  n_devices, schedule       pipeline stages' devices (1), and their schedule (1f1b); options of
                            the schedule, such as n_chunks, are columns too
  n_microbatches            of a replica; or global_batch, the sequences of all replicas
  n_replicas, overlap, grad_sync, shard_optimizer, ...
                            arguments of pipesim.lower
  label                     a name for readers

layers_per_stage: even (the default) gives each stage as many layers, balanced balances the
devices of the row's schedule. An empty cell has the default. A list is quoted, as in
layers_per_stage "8,8,7". Flags are
true, false, yes, no, 1 or 0.

All columns:

"""
_PLAN_FILE = """\
Parameters that are not given are free. The search leaves out what cannot win by its bounds.

  pipesim plan llama3_70b --cluster dgx_h100 --gpus 64 --global-batch 128
  pipesim plan llama3_70b --cluster dgx_h100 --gpus 64 --global-batch 128 \\
      --schedules 1f1b,interleaved_1f1b --tensor-parallel 8 --megatron

A TOML file (--config) holds the same settings; options override it:

  global_batch = 128
  memory_limit = "75GiB"
  tensor_parallel = [4, 8]
  schedules = ["1f1b", "zbv"]
  shard_parameters = ["none", "every", "step"]
  offload = ["none", 0.5]   # of a cluster whose network has a link to the host
  # lengths = [4096, ...]   # tokens of each sequence of the batch; a list packs documents

  [model]                   # or model = "llama3_70b"
  model = "llama3_70b"      # with other sizes, or sizes alone: hidden_size, n_layers, ...
  sequence_length = 4096

  [cluster]                 # parameters of pipesim.Cluster
  machine = "dgx_h100"      # or a list: [["dgx_h100", 32], ["dgx_a100", 32]]
  n_gpus = 64
  usable_memory = 0.95
"""
_VIEW_FILES = """\
The kind of a FILE is recognised by its content:

  timeline.csv, x.parquet   a timeline that pipesim simulate --csv, Timeline.save or pipeexec wrote
  orders.csv, grid.txt      a schedule: torch's CSV with a row a device, or a grid as text; an
                            action takes a clock cycle, or with --costs it is simulated
  trace.json, trace.json.gz a Chrome trace of Timeline.to_chrome or torch.profiler
  report.sqlite             an export of Nsight Systems with the ranges of NVTX
  traces                    a folder of such files, one a rank, or of pp_rank_0.json, ... of Primus
  results/quickstart        a run directory of pipeexec: predictions over measured steps, with
                            the costs of the run
"""

#: Examples below the options of a command.
EXAMPLES: Mapping[str, str] = {
    "view": """\
Several files are below each other on one time axis, or with --layout steps one
at a time:

  pipesim view results/quickstart
  pipesim view before.csv after.csv --layout steps --out change.html
  pipesim view traces --pattern '(?P<op>fwd|bwd) (?P<microbatch>[0-9]+)'
  pipesim view trace.json --fields '{"op": "name", "microbatch": "args.mb"}'

Without --out the page is NAME.html in the current folder, after the first FILE.
There a file that is no such page is not replaced; a file that --out names is.
The page is one file, which needs no server. It opens in the browser, unless
there is none, or no display.
""",
    "demo-page": """\
A device takes 1 ms for a forward and 2 ms for a backward of a micro-batch. A
message of 4 MiB takes 0.02 ms and its bytes at 25 GB/s. Stages of one device
share its seconds and bytes. Schedules that do not take these counts are left
out. The page opens in any browser:

  pipesim demo-page -p 8 -m 16 --out schedules.html

Without --out, a file gallery.html that is no such page is not replaced.
""",
}
#: Further pages of the help of a command, by name.
PAGES: Mapping[str, Mapping[str, str]] = {
    "simulate": {"file": _FILE},
    "compare": {"file": _FILE},
    "sweep": {"file": f"{_SWEEP_FILE}{textwrap.fill(', '.join([*FLAT, 'options']), 78)}\n"},
    "calibrate": {"file": f"{_STEPS_FILE}{textwrap.fill(', '.join(known_columns()), 78)}\n"},
    "plan": {"file": _PLAN_FILE},
    "view": {"file": _VIEW_FILES},
}
