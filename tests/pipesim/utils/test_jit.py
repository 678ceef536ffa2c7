"""When a kernel is compiled, and that it never has to be."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import EngineWarning
from pipesim.simulation.engines.one_pass import one_pass_batched
from pipesim.utils import jit
from pipesim.utils.jit import PLAIN_ELEMENTS_UNCACHED, Kernel, kernel


def _twice(x: float) -> float:
    return 2 * x


def _scaled(columns: Columns, k: int) -> float:
    return columns.scale * columns.values[k] * columns.factors[k]


def doubled() -> Kernel[..., Any]:
    """Return a kernel that has not run yet, with a helper."""

    @kernel(_twice)
    def total(values: np.ndarray, first: int = 0) -> float:
        """Twice the sum from ``first`` on."""
        amount = 0.0
        for k in range(first, len(values)):
            amount += _twice(values[k])
        return amount

    return total


def is_compiled(kernel: Kernel[..., Any]) -> bool:
    """Whether numba has it."""
    return hasattr(kernel._compiled, "py_func")


INTERRUPTED_IMPORT = """
import os, signal, sys, warnings
import numpy as np, pipesim as ps
from pipesim.utils import jit

warnings.simplefilter("error")
signal.signal(signal.SIGINT, signal.default_int_handler)
schedule = ps.schedule("1f1b", 4, 8)

class Interrupt:
    def find_spec(self, name, *_):
        if name == "numba.core.typing":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
kernel = ps.simulation.engines.one_pass.one_pass
for _ in range(2):
    try:
        kernel.compile()
    except KeyboardInterrupt:
        print("interrupted")
assert jit.available()
timeline = ps.simulate(ps.lower(schedule), ps.Costs(1, 2))
print(timeline.makespan, hasattr(kernel._compiled, "py_func"))
"""


@pytest.mark.slow
def test_ctrl_c_while_numba_is_imported() -> None:
    """It waits for the import; kernels can be compiled later in the same process."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n33.0 True\n"), ended.stderr


def test_ctrl_c_while_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the compilation, so that numba keeps all that it has registered."""
    event = pytest.importorskip("numba.core.event")
    # Another cache: in the usual one, other tests may have left this kernel, compiled.
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    class Interrupt(event.Listener):
        n_starts = 0

        def on_start(self, _: object) -> None:
            self.n_starts += 1
            signal.raise_signal(signal.SIGINT)

        def on_end(self, _: object) -> None:
            pass

    total = doubled()
    total.compile()
    compiled, listener = total._compiled, Interrupt()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    event.register("numba:compile", listener)
    try:
        with pytest.raises(KeyboardInterrupt):
            total(np.ones(3))
    finally:
        event.unregister("numba:compile", listener)
        signal.signal(signal.SIGINT, before)
    assert listener.n_starts
    assert len(compiled.signatures) == 1
    assert total(np.ones(3)) == 6


def test_plain_at_first() -> None:
    """Until it has worked through so many elements, counted by its largest array."""
    total, values = doubled(), np.ones(PLAIN_ELEMENTS_UNCACHED // 4)
    for _ in range(4):
        assert total(values) == PLAIN_ELEMENTS_UNCACHED / 2
        assert total._compiled is None
    assert total(np.ones(1)) == 2
    assert is_compiled(total)
    assert total(values) == PLAIN_ELEMENTS_UNCACHED / 2
    assert total(np.ones(3)) == 6


def test_one_large_call_is_compiled() -> None:
    """At once."""
    total = doubled()
    assert total(np.ones(PLAIN_ELEMENTS_UNCACHED + 1), 1) == 2 * PLAIN_ELEMENTS_UNCACHED
    assert is_compiled(total)


def test_numbers_do_not_count() -> None:
    """Without an array there is no work that would be worth it."""

    @kernel()
    def triple(x: int) -> int:
        return 3 * x

    assert [triple(10**6) for _ in range(3)] == [3 * 10**6] * 3
    assert triple._compiled is None


class Columns(NamedTuple):
    """An argument of arrays and a number."""

    values: np.ndarray
    factors: np.ndarray
    scale: float


class Swapped(NamedTuple):
    """The fields of `Columns` in another order, of the same types."""

    factors: np.ndarray
    values: np.ndarray
    scale: float


def test_arrays_of_a_named_tuple_count() -> None:
    """A kernel that takes its columns as one argument is compiled as early as any other."""

    @kernel(_scaled)
    def total(columns: Columns) -> float:
        result = 0.0
        for k in range(len(columns.values)):
            result += _scaled(columns, k)
        return result

    few, many = np.ones(3), np.ones(PLAIN_ELEMENTS_UNCACHED + 1)
    assert total(Columns(few, few, 2.0)) == 6
    assert total._compiled is None
    assert total(Columns(many, many, 2.0)) == 2 * len(many)
    assert is_compiled(total)
    assert total(Columns(few, few, 3.0)) == 9


def test_without_allocation() -> None:
    """Helpers of a kernel that makes no arrays take whole NamedTuples, and answer the same."""

    @kernel(_scaled, allocates=False)
    def fill(columns: Columns, result: np.ndarray) -> None:
        for k in range(len(result)):
            result[k] = _scaled(columns, k)

    columns = Columns(np.arange(5.0), np.full(5, 3.0), 2.0)
    plain, fast = np.zeros(5), np.zeros(5)
    fill(columns, plain)
    fill.compile()
    fill(columns, fast)
    assert is_compiled(fill)
    assert (plain == 6.0 * np.arange(5)).all()
    assert (fast == plain).all()


def test_the_name_in_the_cache_tells_the_order_of_fields() -> None:
    """Compiled code reads fields by position; numba's cache compares their types alone."""

    def first(columns: Columns) -> float:
        return float(columns.values[0])

    def other(columns: Swapped) -> float:
        return float(columns.values[0])

    kernels = [kernel()(function) for function in (first, other)]
    for entry in kernels:
        entry.compile()
    stamps = [kernel.function.__qualname__.rpartition("_")[2] for kernel in kernels]
    assert stamps[0] != stamps[1]


def test_the_name_in_the_cache_tells_the_names_of_types() -> None:
    """An index that names a class which is gone cannot be read: each name has its own index."""
    stamps = []
    for name in ("Old", "New"):
        columns = namedtuple(name, ["values"])

        def first(columns: Any) -> float:
            return float(columns.values[0])

        first.__annotations__["columns"] = columns
        entry = kernel()(first)
        entry.compile()
        stamps.append(entry.function.__qualname__.rpartition("_")[2])
    assert stamps[0] != stamps[1]


def test_on_request() -> None:
    """However small."""
    total = doubled()
    total.compile()
    assert is_compiled(total)
    assert total(np.array([1.0, 4.0])) == 10


def test_the_name_in_the_cache_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel with a helper in another file; else it would be compiled from scratch again."""
    names = []
    for _ in range(2):
        monkeypatch.setattr(one_pass_batched, "_compiled", None)
        one_pass_batched.compile()
        names.append(one_pass_batched.function.__qualname__)
    assert names[0] == names[1]


@pytest.mark.parametrize("value", ["1", "true", "2"])
def test_switched_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's own variable; everything stays Python, and says the same."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    assert not jit.available()
    total = doubled()
    assert total(np.ones(PLAIN_ELEMENTS_UNCACHED + 1)) == 2 * PLAIN_ELEMENTS_UNCACHED + 2
    assert not is_compiled(total)
    total.compile()
    assert total._compiled is total.function


@pytest.mark.parametrize("value", ["", "0"])
def test_switched_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numba reads it."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    assert jit.available()


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba cannot be imported."""
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not jit.available()
    total = doubled()
    assert total(np.ones(PLAIN_ELEMENTS_UNCACHED + 1)) == 2 * PLAIN_ELEMENTS_UNCACHED + 2
    assert total._compiled is total.function


@pytest.fixture
def _imports_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget numba, and whether it could be imported, before and after."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    jit._numba.cache_clear()
    yield
    jit._numba.cache_clear()


@pytest.mark.parametrize(
    "text",
    ["raise ImportError('Numba needs NumPy 2.4 or less. Got NumPy 2.5.')",
     "raise OSError('libllvmlite.so: cannot open shared object file')",
     "import numpy; numpy.no_such_thing"],
)  # fmt: skip
@pytest.mark.usefixtures("_imports_anew")
def test_broken(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there but cannot be imported: plain Python serves, and a warning says why."""
    (tmp_path / "numba.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert jit.available()  # as far as anyone knows
    total, values = doubled(), np.ones(PLAIN_ELEMENTS_UNCACHED + 1)
    with pytest.warns(EngineWarning, match=r"numba cannot be imported \(\w+Error: .*slowly") as w:
        assert total(values) == 2 * len(values)
    assert w[0].filename == __file__
    assert total._compiled is total.function
    assert not jit.available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doubled()(values) == 2 * len(values)  # warned once
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with pytest.warns(EngineWarning, match="SimPy's engine serves"):
        assert ps.simulate(graph, ps.Costs(1, 2), engine="compiled").makespan == 9


def test_nowhere_to_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither this package nor the home folder can be written to."""
    import numba

    njit = numba.njit

    def strict(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'total': no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", strict)
    total = doubled()
    total.compile()
    assert is_compiled(total)
    assert total(np.array([1.0, 4.0])) == 10


def test_names() -> None:
    """A kernel is called what its function is called."""
    total = doubled()
    assert (total.__name__, total.__doc__) == ("total", "Twice the sum from ``first`` on.")
