"""Progress bars in notebooks."""

from __future__ import annotations

from typing import Any

import pytest

from pipesim.utils import progress


def test_bars_leave_nothing_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output shows the number of rows, and is empty in the end; streams get nothing."""
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(data)

    def display(data: dict[str, str], **options: Any) -> Handle:
        assert options == {"raw": True, "display_id": True}
        shown.append(data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    with progress.tqdm(total=2, unit="row", mininterval=0) as bar:
        bar.update()
        bar.update()
    texts = [data.get("text/plain", "") for data in shown]
    assert "0/2" in texts[0]
    assert any("2/2" in text for text in texts)
    assert shown[-1] == {}
    assert "".join(capsys.readouterr()) == ""
