"""Refuse names that say nothing: prepositions, participles, verbs of speech.

``python tools/plain_names.py [--count] [FOLDER...]`` lists each place where a name of `REFUSED` is
defined: a function, class, parameter, variable, field or import. Exits with 1 if there is any. With
``--count`` it prints totals alone: names, and words of `PROSE` in docstrings and comments.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pipesim", "pipeexec", "tests", "benchmarks", "tools")
#: Names that say nothing alone. Compounds (``n_found``, ``seconds_by_op``) are free.
REFUSED = frozenset(
    [
        "among",
        "at",
        "away",
        "behind",
        "beside",
        "beyond",
        "by",
        "of",
        "off",
        "on",
        "onto",
        "upon",
        "within",
        "asked",
        "begun",
        "brought",
        "dealt",
        "done_with",
        "found",
        "given",
        "gone",
        "handed",
        "known",
        "let_go",
        "made",
        "met",
        "seen",
        "taken",
        "said",
        "say",
        "says",
        "tell",
        "tells",
        "told",
        "each",
        "here",
        "mine",
        "ours",
        "theirs",
        "there",
        "those",
        "whoever",
        "whose",
    ]
)
#: Public names, which stay: file and name.
ALLOWED = frozenset(
    {
        ("pipesim/costs/costs.py", "of"),
        ("pipesim/scheduling/registry.py", "of"),
        ("pipeexec/executor/step_memory.py", "at"),
        ("pipeexec/executor/step_memory.py", "given"),
        ("pipeexec/executor/step_memory.py", "taken"),
    }
)
#: Phrases of docstrings and comments that have a plain form.
PROSE = re.compile(
    r"\b(?:said|brought|lets? (?:it |them |\w+ )?go|whoever|nobody|of its own|as ever|to and fro|"
    r"one behind the other|dealt|what it (?:needs|takes|holds)|goes on|is at|was at|away|"
    r"where there (?:is|are)|no more than|in turn)\b",
    re.IGNORECASE,
)


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each definition in a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def refused(path: Path) -> list[tuple[int, str]]:
    """Return the line and name of each refused definition in a file."""
    place = path.resolve().relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text())
    return sorted(
        (line, name)
        for line, name in definitions(tree)
        if name.strip("_") in REFUSED and (place, name) not in ALLOWED
    )


def prose(path: Path) -> str:
    """Return the docstrings and comments of a file."""
    texts = []
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and token.string.endswith('"""')
            ):
                texts.append(token.string)
    return "\n".join(texts)


def main() -> int:
    """Print what is refused; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", action="store_true", help="print totals alone")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    folders = options.folders or [ROOT / name for name in FOLDERS]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    hits = [(path, line, name) for path in files for line, name in refused(path)]
    if options.count:
        words = sum(len(PROSE.findall(prose(path))) for path in files)
        print(f"{len(files)} files, {len(hits)} refused names, {words} phrases with a plain form")
        for name, number in Counter(name for _, _, name in hits).most_common():
            print(f"{number:6d} {name}")
        return 0
    for path, line, name in hits:
        print(f"{path}:{line}: {name!r} names nothing; use a noun of the field")
    return bool(hits)


if __name__ == "__main__":
    sys.exit(main())
