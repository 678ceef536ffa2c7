"""JavaScript without a browser: modules of a page, run by Deno."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

PAGE = ROOT / "pipesim" / "plot" / "page" / "program"  # modules of the interactive timeline


def run_module(
    source: str, stdin: bytes = b"", *, folder: Path = PAGE, timeout: float = 60.0
) -> bytes:
    """Run the text of an ES module, and return what it prints.

    The module imports files of ``folder`` as if it were one of them. It reads and writes through
    Deno: it has no access to other files, the environment or the network::

        run_module(
            '''
            import { simulate } from "./simulate.js";
            const graph = await new Response(Deno.stdin.readable).json();
            console.log(JSON.stringify(simulate(graph)));
            ''',
            json.dumps(graph).encode(),
        )

    The test is skipped where Deno is not installed.

    Raises
    ------
    AssertionError
        The module cannot be loaded, or throws. The message is what Deno prints to stderr.
    subprocess.TimeoutExpired
        It runs for more than ``timeout`` seconds.
    """
    with _prepared(source, folder) as (command, environment):
        run = subprocess.run(
            command, input=stdin, capture_output=True, timeout=timeout, check=False, env=environment
        )
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout


@contextmanager
def _prepared(source: str, folder: Path) -> Iterator[tuple[list[Any], dict[str, str]]]:
    """Return the command that runs a module, and its environment."""
    deno = pytest.importorskip("deno", reason="deno is not installed: pip install -e '.[dev]'")
    with tempfile.TemporaryDirectory() as name:
        main, imports = Path(name) / "run_module.js", Path(name) / "imports.json"
        main.write_text(source)
        # The longest entry that fits applies.
        paths = {"./": f"{folder.resolve().as_uri()}/", "./run_module.js": "./run_module.js"}
        imports.write_text(json.dumps({"imports": paths}))
        flags = ["--quiet", "--no-prompt", "--no-config", "--no-lock", "--no-remote", "--no-npm"]
        command = [deno.find_deno_bin(), "run", *flags, f"--import-map={imports}", main]
        yield (
            command,
            {**os.environ, "DENO_DIR": name, "DENO_NO_UPDATE_CHECK": "1", "NO_COLOR": "1"},
        )


#: Answer requests: each is its length as 4 bytes, and its bytes; an answer is a line.
_SERVE = """
const input = Deno.stdin.readable.getReader();
let buffer = new Uint8Array(0);
async function take(n) {
  while (buffer.length < n) {
    const { value, done } = await input.read();
    if (done) Deno.exit(0);
    const joined = new Uint8Array(buffer.length + value.length);
    joined.set(buffer);
    joined.set(value, buffer.length);
    buffer = joined;
  }
  const taken = buffer.slice(0, n);
  buffer = buffer.slice(n);
  return taken;
}
for (;;) {
  const size = new DataView((await take(4)).buffer).getUint32(0, true);
  const request = await take(size);
  let line;
  try {
    line = JSON.stringify({ answer: answer(request) });
  } catch (error) {
    line = JSON.stringify({ error: error.stack });
  }
  const bytes = new TextEncoder().encode(line + "\\n");
  for (let k = 0; k < bytes.length;) k += await Deno.stdout.write(bytes.subarray(k));
}
"""


@contextmanager
def answering(source: str, *, folder: Path = PAGE) -> Iterator[Callable[[bytes], Any]]:
    """Run a module that has a function ``answer`` of bytes; return a function that asks it.

    The result of ``answer`` comes back through JSON. What it throws is an `AssertionError`.
    """
    with _prepared(source + _SERVE, folder) as (command, environment):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None
        requests, lines = process.stdin, process.stdout

        def ask(request: bytes) -> Any:
            requests.write(len(request).to_bytes(4, "little") + request)
            requests.flush()
            reply = json.loads(lines.readline() or '{"error": "the module has ended"}')
            assert "error" not in reply, reply["error"]
            return reply["answer"]

        try:
            yield ask
        finally:
            requests.close()
            lines.close()
            process.wait(timeout=10)
