"""Layout strings of Megatron: read, written, and refused with the position of a mistake."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs import read_layout, write_layout
from pipesim.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("EtL", [1]),
        ("EL", [0]),
        ("E|t|L", [0, 1, 0]),
        ("Ett|tt|ttL", [2, 2, 2]),
        ("Et*2|(t*2|)*34,t*3|tL", [2, *[2] * 34, 3, 1]),  # with a comma, as Megatron's examples
        ("Et*3|(tt|)*29,t|L", [3, *[2] * 29, 1, 0]),
        ("E ( t | )*2 ((t|)*2 tt|)*2 L", [1, 1, 1, 1, 2, 1, 1, 2, 0]),
        ("Et*0|ttL", [0, 2]),
    ],
)
def test_reads(text: str, layers: list[int]) -> None:
    assert read_layout(text) == tuple(layers)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_what_is_written_is_read(layers: list[int]) -> None:
    assert read_layout(write_layout(layers)) == tuple(layers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|xL", r"position 3 of the layout, 'x': only E, t"),
        ("Etm|tL", r"position 2 of the layout, 'm': multi-token prediction stands behind"),
        ("Et|LtmL", r"position 3 of the layout, 'L': a loss stands behind the last t"),
        ("Et|LLmmL", r"position 4 of the layout, 'L': the losses of all layers before it"),
        ("Et|LmmL", r"'L': the loss stands once, or once for each of 3 losses, but L 2 times"),
        ("*2EtL", r"position 0 of the layout, '\*': nothing stands before it"),
        ("Et|(*2)L", r"position 4 .*nothing stands before"),
        ("Et|(t|L", r"position 3 of the layout, '\(': the bracket is never closed"),
        ("Et|)tL", r"position 3 of the layout, '\)': no bracket is open"),
        ("Et*|tL", r"position 3 of the layout, '\|': a whole number .* must follow \*"),
        ("Et*-1|L", r"position 3 of the layout, '-': a whole number .* must follow \*"),
        ("Et*", r"position 2 of the layout, '\*': a whole number must follow"),
        ("t|tL", "position 0 of the layout, 't': the layout must begin with E"),
        ("Et*2|(t*8)", r"position 6 of the layout, 't': the layout must end with L"),
        ("EtL|tL", r"position 2 of the layout, 'L': the loss stands once, but L 2 times"),
        ("EtE|tL", r"position 2 of the layout, 'E': the embedding stands once, but E 2 times"),
        ("Et*999999999L", "more than 1,000,000 letters"),
        ("", "must begin with E"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_layout(text)


def test_the_mistake_is_pointed_to() -> None:
    with pytest.raises(ArgumentError) as error:
        read_layout("Et|xL")
    assert str(error.value).splitlines()[1:] == ["    Et|xL", "       ^"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("Et*16||t*16L", r"position 6 of the layout, '\|': stage 1, which ends here, has no layer"),
        ("Et*16|(|)*2t*16L", r"position 7 .*stage 1, which ends here"),
        ("Even", "'Even'; did you mean 'even'"),
        ("balance", "'balance'; did you mean 'balanced'"),
        ("16,16", r"is text; give \[16, 16\], without quotes"),
    ],
)
def test_no_split_of_a_model(split: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.Transformer.preset("llama3_8b").costs(split, microbatch_size=1, flops_per_second=4e14)
    with pytest.raises(ArgumentError, match="position 3 of the layout, 'L': stage 1"):
        ps.Layers({"forward": [1], "backward": [2]}).costs("Et|L")


def test_costs_of_a_layout() -> None:
    """As those of the layers of each stage."""
    model = ps.Transformer.preset("llama3_8b")
    options = {"microbatch_size": 1, "flops_per_second": 4e14}
    layout = "Et*7|(t*9|)*2t*7L"
    assert model.costs(layout, **options) == model.costs([7, 9, 9, 7], **options)
    with pytest.raises(ArgumentError, match="sums to 31 layers, but there are 32"):
        model.costs("Et*7|(t*9|)*2t*6L", **options)
    with pytest.raises(ArgumentError, match="layers_per_stage: mistake at position 3"):
        model.costs("Et|?L", **options)


def test_the_layout_of_costs() -> None:
    """Costs of a transformer know it, costs of profiled layers do not."""
    model = ps.Transformer.preset("llama3_8b")
    options: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 4e14}
    costs = model.costs([7, 9, 9, 7], **options)
    assert costs.layout == "Et*7|(t*9|)*2t*7L"
    assert model.costs(costs.layout, **options) == costs
    balanced = model.costs("balanced", placement=ps.Placement.v_shaped(4), **options).layout
    assert balanced is not None
    assert sum(read_layout(balanced)) == 32
    assert len(read_layout(balanced)) == 8
    assert ps.Costs(1, 2).layout is None
    assert costs.in_chunks(ps.Placement.v_shaped(4)).layout is None
    assert model.costs(1, **options).layout == "Et*32L"
    layers = ps.Layers({"forward": [1, 1, 4], "backward": [2, 2, 8]})
    assert layers.costs(2).layout is None
    assert write_layout(layers.split(2)) == "Et*2|tL"


@pytest.mark.parametrize("value", [[], [1, -1], [1.5], "Et|tL", 3, None, [True]])
def test_no_layers_to_write(value: Any) -> None:
    with pytest.raises(ArgumentError, match="layers_per_stage"):
        write_layout(value)
