"""Folders of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
BENCHMARKS = ROOT / "benchmarks"
DATA = ROOT / "tests" / "data"
HELPERS = Path(__file__).parent
#: Figures from papers and measured runs, as JSON with their sources.
PUBLISHED = ROOT / "tests" / "published"
