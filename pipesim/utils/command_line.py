"""Command lines: options from signatures and docstrings, and help by groups.

``--help`` of a command is at most `MOST_LINES` long: large groups are listed without their texts.
``--help GROUP`` has the full texts of a group, and ``--help all`` everything.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

from pipesim._version import __version__
from pipesim.errors import ArgumentError, check_name
from pipesim.utils.packages import import_extra

#: Most lines of the short help of a command.
MOST_LINES = 60
#: Column of the texts of options in the short help.
_TEXT_COLUMN = 26
#: Words after a comma that begin a clause, which a short text can lack.
_CLAUSES = "as|for|if|one|or|over|such|which|with"


# Parameters of functions


def descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each parameter or attribute in a numpydoc docstring, as text."""
    sections = re.findall(
        r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=^\S[^\n]*\n---|\Z)",
        f"{inspect.getdoc(function)}\n",
        re.MULTILINE | re.DOTALL,
    )
    return {  # without reStructuredText's marks of code
        name.strip(" *"): re.sub(r'``"([^"`]*)"``', r"\1", inspect.cleandoc(f"\n{text}")).replace(
            "`", ""
        )
        for section in sections
        for names, text in re.findall(r"^(\S.*)\n((?: +.*\n|\n)+)", section, re.MULTILINE)
        for name in names.split(",")
    }


def literals(function: Callable[..., Any], annotation: str) -> tuple[str, ...]:
    """Return the texts that an annotation in a function lists, such as `Literal` ones."""
    listed = re.findall(r"'(\w+)'", annotation)
    scope = vars(sys.modules[function.__module__])
    aliases = [scope.get(word) for word in re.findall(r"\w+", annotation)]
    return tuple(dict.fromkeys([*listed, *(text for x in aliases for text in _texts_of(x))]))


def _texts_of(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (value for value in get_args(hint) if isinstance(value, str))
    else:
        for part in get_args(hint):
            yield from _texts_of(part)


def add_options(
    group: argparse._ActionsContainer,
    function: Callable[..., Any],
    names: Iterable[str] | None = None,
    *,
    prefix: str = "",
    flags: Mapping[str, str] | None = None,
    metavars: Mapping[str, str] | None = None,
    helps: Mapping[str, str] | None = None,
    parse: Callable[[str], Any] = str,
    with_defaults: bool = False,
) -> None:
    """Add an option for each of some parameters of a function, by default all with a default.

    Values are stored as ``prefix`` and the name of the parameter; ``with_defaults``, also those of
    options that are not given. ``flags``, ``metavars`` and ``helps`` hold where the signature and
    the docstring do not suit a command line.
    """
    parameters, helps = inspect.signature(function).parameters, helps or {}
    texts = descriptions(function)
    if names is None:
        names = [x.name for x in parameters.values() if x.default is not x.empty]
    for name in names:
        default, annotation = parameters[name].default, str(parameters[name].annotation)
        text = helps.get(name) or texts[name]
        if default and isinstance(default, (str, int, float)) and "default" not in text:
            text += f" (default: {default})"
        flag = (flags or {}).get(name, f"--{name.replace('_', '-')}")
        options: dict[str, Any] = {"dest": f"{prefix}{name}", "help": text.replace("%", "%%")}
        if with_defaults:
            options["default"] = default
        if annotation == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        words = literals(function, annotation)
        metavar = (metavars or {}).get(name) or "|".join(words) or _metavar(name, annotation)
        action = group.add_argument(flag, type=parse, metavar=metavar, **options)
        action.words = words  # type: ignore[attr-defined]


def _metavar(name: str, annotation: str) -> str:
    """Return a word for the values of an option."""
    for pattern, metavar in (
        ("Iterable", "VALUE"), ("PerStage", "BYTES" if name.endswith("bytes") else "SECONDS"),
        ("Bytes", "BYTES"), ("bool", "BOOL"), ("int|Buckets|Count|Whole|Size|OptionalSize", "N"),
        ("float|NotNegative|Seconds|Positive|Fraction|Amount", "NUMBER"), ("str", "NAME"),
    ):  # fmt: skip
        if re.search(rf"\b(?:{pattern})\b", annotation):
            return metavar
    return "VALUE"


# Parsers


class RaisingParser(argparse.ArgumentParser):
    """A parser that raises `ArgumentError`, so that all mistakes are reported alike."""

    def error(self, message: str) -> NoReturn:
        """Raise `ArgumentError` with the message, and the command that prints the help."""
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the name of the command and the version, and exits."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"{parser.prog} {__version__}",
        help="print the version and exit",
    )


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add ``--completion``, which prints a script that completes the command in a shell."""
    shells = ("bash", "zsh", "fish", "tcsh", "powershell")
    text = "print a script that completes this command in a shell, and exit"
    parser.add_argument("--completion", action=_Completion, choices=shells, help=text)


class _Completion(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        shtab = import_extra("shtab", "completion", "--completion")
        for command in _parsers(parser):
            for action in command._actions:
                words = getattr(action, "words", ())
                if isinstance(action, _Help):
                    words = command.topics
                if callable(words):  # lists presets
                    words = tuple(words().index)
                action.choices = action.choices or words or None
                action.help = _sentence(action).replace("%", "%%")
                if "FILE" in str(action.metavar):
                    action.complete = shtab.FILE
        sys.stdout.write(shtab.complete(parser, values) + "\n")
        parser.exit()


def _parsers(parser: Any) -> Iterator[Any]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


class _Help(argparse._HelpAction):
    """Print the help of a command, or of one of its groups."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, help="print this help, or the full texts of a GROUP")
        self.nargs, self.metavar = "?", "GROUP"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        sys.stdout.write(parser.format_help() if values is None else parser.topic(values))
        parser.exit()


class CommandParser(RaisingParser):
    """The parser of a command, with help by groups; ``pages`` are further texts of the help."""

    def __init__(self, *, pages: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(add_help=False, **options)
        self._positionals.title = "arguments"
        self.pages = dict(pages or {})
        self.add_argument("-h", "--help", action=_Help)

    def _groups(self) -> dict[str, argparse._ArgumentGroup]:
        return {str(group.title): group for group in self._action_groups if group._group_actions}

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of everything that ``--help`` can explain."""
        return ("all", *self._groups(), *self.pages)

    def format_usage(self) -> str:
        """Return one line, with the positional arguments."""
        formatter = self._get_formatter()
        arguments = self._get_positional_actions()
        words = [formatter._format_args(x, str(x.metavar or x.dest)) for x in arguments]
        return " ".join(["usage:", self.prog, "[OPTION ...]", *words]) + "\n"

    def format_help(self) -> str:
        """Return the short help: a line an option, and the largest groups without texts."""
        sizes = {name: len(group._group_actions) for name, group in self._groups().items()}
        packed: list[str] = []
        while (text := self._short(packed)).count("\n") > MOST_LINES and len(packed) < len(sizes):
            packed.append(max(sizes.keys() - packed, key=lambda name: sizes[name]))
        return text

    def _short(self, packed: Collection[str]) -> str:
        width = _width()
        parts = [self.format_usage(), f"{self.description}\n"]
        for name, group in self._groups().items():
            actions = group._group_actions
            title = f"{name}: {group.description or ''}".rstrip()
            if name in packed:
                flags = " ".join(_invocation(x).partition(" ")[0].rstrip(",") for x in actions)
                texts = [
                    _filled(f"{title} (--help {name} explains)", width, ""),
                    _filled(flags, width),
                ]
            else:
                texts = [_filled(title, width, ""), *(_line(x, width) for x in actions)]
            parts.append("\n".join(texts) + "\n")
        if self.epilog:
            parts.append(f"{self.epilog.rstrip()}\n")
        parts.append(_filled(f"GROUP of --help: {', '.join(self.topics)}", width, "") + "\n")
        return "\n".join(parts)

    def topic(self, name: str) -> str:
        """Return the full texts of a group or a page, or of all of them."""
        check_name("group of --help", name, self.topics)
        groups = {
            title: _texts(f"{title}: {group.description or ''}", group._group_actions, _width())
            for title, group in self._groups().items()
        }
        pages = {**groups, **self.pages}
        return "\n".join(pages.values() if name == "all" else [pages[name]])


def _width() -> int:
    return shutil.get_terminal_size().columns - 2


def _filled(text: str, width: int, indent: str = "  ") -> str:
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _invocation(action: argparse.Action) -> str:
    """Return an option with the word for its value."""
    names = ", ".join(action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction):
        return action.option_strings[1].replace("--no-", "--[no-]")
    if action.nargs == 0:
        return names
    word = str(action.metavar or "|".join(action.choices or ()) or action.dest.upper())
    word = f"[{word}]" if action.nargs == "?" else word
    return f"{names} {word}".strip()


def _help_text(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _sentence(action: argparse.Action) -> str:
    """Return the first sentence of the text of an option, beginning with a small letter."""
    first = " ".join(re.split(r"\.(?:\s|$)|:\n|\n\n", _help_text(action))[0].split())
    is_word = first[1:2].islower() or first.startswith("A ")
    return first[0].lower() + first[1:] if is_word else first


def _line(action: argparse.Action, width: int) -> str:
    """Return a line with an option and the first sentence of its text, or a part that fits."""
    name, first = _invocation(action), _sentence(action)
    column = max(_TEXT_COLUMN, len(name) + 4)
    room = width - column
    if len(first) > room:
        clause = re.match(rf"[^(]{{12,{room - 1}}}(?=[;:] | \(|, (?:{_CLAUSES})\b)", first)
        first = clause[0] if clause else textwrap.shorten(first, room, placeholder=" ...")
    return f"  {name:<{column - 2}}{first}".rstrip()


def _texts(title: str, actions: Iterable[argparse.Action], width: int) -> str:
    """Return the full texts of options; those of one text are together."""
    lines, text = [_filled(title, width, "")], ""
    for action in actions:
        if text and _help_text(action) != text:
            lines.append(_paragraphs(text, width))
        text = _help_text(action)
        lines.append(f"  {_invocation(action)}")
    return "\n".join([*lines, _paragraphs(text, width)]) + "\n"


def _paragraphs(text: str, width: int) -> str:
    """Return a text whose paragraphs and items of lists are filled, below an option."""
    parts = re.split(r"\n\n|\n(?=- )", text)
    return "\n".join(_filled(" ".join(part.split()), width, " " * 6) for part in parts)
