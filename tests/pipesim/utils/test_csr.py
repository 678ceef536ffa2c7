"""Rows of different lengths in two arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import as_python, compiled

from pipesim.utils.csr import CSR, bincount, ids_dtype

#: A number of rows, and the row of each value.
rows_of_values = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=12))
)


def test_by_hand() -> None:
    """Values keep their order within a row; a row may be empty."""
    csr = CSR.from_pairs(np.array([2, 0, 2, 3]), np.array([5, 6, 7, 8]), 4)
    assert csr.ptr.tolist() == [0, 1, 1, 3, 4]
    assert [csr[row].tolist() for row in range(len(csr))] == [[6], [], [5, 7], [8]]
    assert csr.rows.tolist() == [0, 2, 2, 3]
    assert csr.gather(np.array([2, 1, 0, 2])).tolist() == [5, 7, 6, 5, 7]
    assert csr.gather(np.array([], dtype=np.int64)).tolist() == []


def test_ids_are_of_one_type() -> None:
    """Whatever type they come in: for each, kernels would be compiled anew."""
    rows = np.array([1, 0])
    for dtype in (np.int32, np.int64):
        assert CSR.from_pairs(rows, np.array([2, 3], dtype), 2).values.dtype == np.int32
    assert CSR.from_pairs(rows, np.array([2**31, 0]), 2)[1].tolist() == [2**31]
    assert CSR.from_pairs(rows[:0], rows[:0], 2).values.dtype == np.int32


def test_bincount_by_hand() -> None:
    """Sums of each row, as floats; a row may be empty."""
    sums = bincount(np.array([2, 0, 2]), np.array([5.0, 6.0, 7.0]), 4)
    assert sums.tolist() == [6.0, 0.0, 12.0, 0.0]
    none = bincount(np.empty(0, np.int64), np.empty(0), 2)
    assert none.dtype == np.float64
    assert none.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", [compiled, as_python])
@given(rows_of_values)
def test_group(mode: type, case: tuple[int, list[int]]) -> None:
    """Each position once, in the row that its number names, compiled and not."""
    n_rows, numbers = case
    with mode():
        csr = CSR.group(np.array(numbers, dtype=np.int64), n_rows)
    assert len(csr) == n_rows
    assert csr.ptr.dtype == csr.values.dtype == np.int32
    for row in range(n_rows):
        assert csr[row].tolist() == [k for k, number in enumerate(numbers) if number == row]
    assert csr.rows.tolist() == sorted(numbers)


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=12),
        )
    )
)
def test_transpose(case: tuple[int, list[tuple[int, int]]]) -> None:
    """The same pairs the other way round; twice is the same again, sorted."""
    n, pairs = case
    rows, values = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    csr = CSR.from_pairs(rows, values, n)
    back = csr.transpose()
    assert sorted(zip(back.rows.tolist(), back.values.tolist(), strict=True)) == sorted(
        (b, a) for a, b in pairs
    )
    again = back.transpose()
    assert (again.ptr == csr.ptr).all()
    assert [again[k].tolist() for k in range(n)] == [sorted(csr[k].tolist()) for k in range(n)]


@given(rows_of_values, st.data())
def test_gather(case: tuple[int, list[int]], data: st.DataObject) -> None:
    """The values of rows, one row after the other."""
    n_rows, numbers = case
    csr = CSR.group(np.array(numbers, dtype=np.int64), n_rows)
    rows = data.draw(st.lists(st.integers(0, n_rows - 1), max_size=5))
    wanted = [value for row in rows for value in csr[row].tolist()]
    assert csr.gather(np.array(rows, dtype=np.int64)).tolist() == wanted


def test_width_of_ids() -> None:
    """32 bits up to 2^31 - 1."""
    assert ids_dtype(2**31 - 1) is np.int32
    assert ids_dtype(2**31) is np.int64
