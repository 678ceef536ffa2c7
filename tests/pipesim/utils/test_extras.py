"""Optional packages: one way to ask for them, and one message."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

from pipesim.errors import ArgumentError
from pipesim.utils.packages import EXTRAS, import_extra, install_command


def test_extras_of_the_distribution() -> None:
    """Each extra is one of pyproject.toml, and installs the package that messages name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"dev", "docs", "exec", "notebook"}
    assert set(extras["exec"]) <= set(extras["dev"])
    for extra, package in EXTRAS.items():
        assert extras[extra][0].startswith(package.lower())
        assert set(extras[extra]) <= {requirement.strip() for requirement in extras["dev"]}


def test_an_installed_module() -> None:
    assert import_extra("json", "fit", "a test") is sys.modules["json"]


@pytest.mark.parametrize("missing", ["scipy", "scipy.optimize"])
def test_a_missing_module(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    if missing == "scipy.optimize":
        monkeypatch.setitem(sys.modules, missing, None)
    expected = r"^a fit needs SciPy, which is not installed; pip install 'pipesim\[fit\]'\. Or not$"
    with pytest.raises(ArgumentError, match=expected):
        import_extra("scipy.optimize", "fit", "a fit", advice="Or not")


def test_a_package_that_lacks_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing the extra again would not help: the error is Python's own."""
    (tmp_path / "broken_extra.py").write_text("import missing_dependency_of_extra\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_dependency_of_extra"):
        import_extra("broken_extra", "fit", "a fit")


def test_a_package_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old_extra.py").write_text("from json import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot be imported here: .*nothing_of_this_name"):
        import_extra("old_extra", "fit", "a fit")


def test_the_command_that_installs() -> None:
    assert install_command("optimal") == "pip install 'pipesim[optimal]'"
