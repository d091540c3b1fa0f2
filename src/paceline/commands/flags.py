"""Flags made from fields, so that parser, `--help` and documentation are one thing.

A verb is a class. Each of its fields is a flag or an argument, the text under a field is its help, and `run` does the
work:

    class Plot(Verb):
        '''Draw the learning curves of runs.'''

        runs: Annotated[tuple[str, ...], Argument("RUN")]
        smooth: Annotated[int, Flag("K")] = 1
        '''Moving average over K rows.'''

A field's type decides what the flag takes: `bool` nothing, `Literal` one of its words, a tuple any number of values.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import operator
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Verb(ABC):
    """One command; its subclasses become frozen dataclasses.

    The first paragraph of the docstring is the line in `paceline --help`, the rest the description.
    """

    usage: ClassVar[str | None] = None
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """`title: description` in `--help` → fields listed under it."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @abstractmethod
    def run(self) -> int:
        """Do the work and return the exit status."""

    @classmethod
    def epilog(cls, arguments: Sequence[str]) -> str:
        """Text for the end of `--help`. `arguments`: all words after the verb."""
        return ""


@dataclass(frozen=True)
class VerbGroup:
    """A verb with verbs below it, such as `bench suite` and `bench scaling`."""

    about: str
    metavar: str
    verbs: Mapping[str, type[Verb]]


@dataclass(frozen=True)
class Flag:
    metavar: str | None = None
    also: tuple[str, ...] = ()
    """Other spellings, such as `-o`."""
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class Argument:
    """A positional argument, optional where the field has a default."""

    metavar: str
    rest: bool = False
    """Take the rest of the line, without a leading `--`."""


@dataclass(frozen=True)
class SettingFlags:
    """Marks a `dict` field that holds the settings given: one flag for each setting that is listed here."""

    model: type[BaseModel]
    flags: Mapping[str, tuple[str, ...]]
    """Setting, with dots where it is nested → its flag and other spellings."""
    help: Mapping[str, str] = field(default_factory=dict)
    """Help to show instead of the description of a setting."""
    metavars: Mapping[str, str] = field(default_factory=dict)
    """Metavars to show instead of those that follow from the type."""


@dataclass(frozen=True)
class Option:
    """A flag or argument, as argparse takes it."""

    field: str
    setting: str
    """Key in a field marked by `SettingFlags`, else empty."""
    names: tuple[str, ...]
    """Spellings; empty for a positional argument."""
    help: str
    keywords: Mapping[str, Any]
    least: int | None = None
    most: int | None = None

    @property
    def takes_rest(self) -> bool:
        """Whether it is a command, whose words are its own business."""
        return self.keywords.get("nargs") == argparse.REMAINDER

    @property
    def dest(self) -> str:
        return f"{self.field}:{self.setting}" if self.setting else self.field

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        text = self.help.replace("%", "%%")
        if self.names:
            parser.add_argument(*self.names, dest=self.dest, help=text, **self.keywords)
        else:
            parser.add_argument(self.dest, help=text, **self.keywords)


def options(verb: type[Verb]) -> Iterator[Option]:
    """Every flag and argument of a verb, in the order of its fields."""
    hints, texts = get_type_hints(verb, include_extras=True), _field_texts(verb)
    for each in fields(verb):
        kind, mark = _unwrap(hints[each.name])
        if isinstance(mark, SettingFlags):
            yield from _setting_options(each.name, mark)
        else:
            yield _option(each, kind, mark, texts.get(each.name, ""))


def make_verb(verb: type[Verb], parsed: argparse.Namespace) -> Verb:
    """The verb with the values that argparse has read; UserError where one is out of bounds."""
    values: dict[str, Any] = {}
    for option in options(verb):
        value = getattr(parsed, option.dest)
        _check_value(option, value)
        for word, bound, holds in (("least", option.least, operator.ge), ("most", option.most, operator.le)):
            if value is not None and bound is not None and not holds(value, bound):
                from paceline.config import UserError

                raise UserError(f"{option.names[-1]} {value:g}: must be at {word} {bound}")
        if option.setting:
            values.setdefault(option.field, {}).update({} if value is None else {option.setting: value})
        elif isinstance(value, list):
            values[option.field] = tuple(value[1:] if value[:1] == ["--"] else value)
        else:
            values[option.field] = value
    return verb(**values)


def _check_value(option: Option, value: Any) -> None:
    """UserError for an empty text, which is an unset variable of the shell's, and for a number such as nan."""
    name = option.names[-1] if option.names else str(option.keywords["metavar"])
    empty = value == "" or (isinstance(value, list) and "" in value and not option.takes_rest)
    if empty or (isinstance(value, float) and not math.isfinite(value)):
        from paceline.config import UserError

        raise UserError(f"{name} '': the value is empty" if empty else f"{name} {value}: expected a finite number")
    if any(isinstance(one, str) and one.startswith("~") for one in (value if isinstance(value, list) else [value])):
        from paceline.config.values import expanded

        for one in value if isinstance(value, list) else [value]:
            expanded(one)


def words(verb: Verb, *names: str) -> list[str]:
    """The flags and values that set these fields as they are set in `verb`."""
    made: list[str] = []
    chosen = [option for option in options(type(verb)) if option.field in names]
    for option in sorted(chosen, key=lambda option: names.index(option.field)):
        value = getattr(verb, option.field)
        value = value.get(option.setting) if option.setting else value
        if value is True:
            made.append(option.names[0])
        elif value is not None and value is not False:
            several = value if isinstance(value, (list, tuple)) else [value]
            made += [word for each in several for word in (option.names[0], str(each))]
    return made


def flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _option(each: Field[Any], kind: Any, mark: Flag | Argument | None, text: str) -> Option:
    required, many = each.default is MISSING, get_origin(kind) is tuple
    element = get_args(kind)[0] if many else kind
    keywords: dict[str, Any] = {"metavar": mark.metavar} if mark and mark.metavar else {}
    if get_origin(element) is Literal:
        keywords["choices"] = get_args(element)
    elif element is not bool:
        keywords["type"] = element
    if isinstance(mark, Argument):
        if many or not required:
            keywords["nargs"] = argparse.REMAINDER if mark.rest else "+" if many else "?"
        return Option(each.name, "", (), text, keywords)
    if element is bool:
        keywords["action"] = "store_true"
    elif many:
        keywords |= {"action": "append", "default": []}
    else:
        keywords |= {"required": True} if required else {"default": each.default}
    text, mark = _explained(text, keywords.get("default"), keywords), mark or Flag()
    return Option(each.name, "", (*mark.also, flag_name(each.name)), text, keywords, mark.least, mark.most)


def _setting_options(field: str, mark: SettingFlags) -> Iterator[Option]:
    for key, names in mark.flags.items():
        *sections, last = key.split(".")
        owner: Any = mark.model
        for section in sections:
            owner = owner.model_fields[section].annotation
        setting = owner.model_fields[last]
        kind, _ = _unwrap(setting.annotation)
        keywords = {"metavar": mark.metavars.get(key) or _metavar(kind, last)}
        if get_origin(kind) is tuple:
            keywords["action"] = "append"
        text = mark.help.get(key) or " ".join((setting.description or "").split())
        text = _explained(text, setting.get_default(call_default_factory=True), keywords)
        yield Option(field, key, names, text, keywords)


def _explained(text: str, default: Any, keywords: Mapping[str, Any]) -> str:
    """The help of a flag, with its default, and whether it may be repeated."""
    if keywords.get("action") == "append":
        return f"{text.removesuffix('.')}; may be repeated."
    if not default or "default" in text:
        return text
    if keywords.get("metavar") == "TIME":
        default = f"{default / 60:g}m"
    shown = ",".join(map(str, default)) if isinstance(default, list) else default
    return f"{text.removesuffix('.')} (default: {shown})."


def _metavar(kind: Any, name: str) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return "A,B" if get_origin(kind) is list else "N" if kind is int else name.upper()


def _unwrap(hint: Any) -> tuple[Any, Any]:
    """A type without `None` and `Annotated`, and its mark."""
    mark = None
    while True:
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            mark = mark or marks[0]
        elif get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint):
            hint = next(each for each in get_args(hint) if each is not type(None))
        else:
            return hint, mark


def _field_texts(verb: type[Verb]) -> dict[str, str]:
    """The texts under the fields, of the class and of those it inherits from."""
    texts: dict[str, str] = {}
    for cls in reversed(verb.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for line, text in pairwise(tree.body):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(text, ast.Expr):
                texts[line.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts
