"""The command line: finds the verb, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline.commands.bench import BENCH
from paceline.commands.cluster import CLUSTER
from paceline.commands.compare import CompareVerb
from paceline.commands.dashboard import DashboardVerb
from paceline.commands.doctor import DoctorVerb
from paceline.commands.envs import EnvsVerb
from paceline.commands.evaluate import EvaluateVerb
from paceline.commands.export import ExportVerb
from paceline.commands.flags import Verb, VerbGroup, make_verb, options
from paceline.commands.jobs import CancelVerb, FetchVerb, JobsVerb, LogsVerb
from paceline.commands.launch import LaunchVerb
from paceline.commands.plot import PlotVerb
from paceline.commands.report import ReportVerb
from paceline.commands.runs import RunsVerb
from paceline.commands.status import StatusVerb
from paceline.commands.submit import SubmitVerb
from paceline.commands.train import TrainVerb
from paceline.commands.tune import TuneVerb

MAX_LINE = 1000
FAILED, BAD_INPUT, CTRL_C = 1, 2, 130
VERBS: dict[str, type[Verb] | VerbGroup] = {
    "train": TrainVerb,
    "evaluate": EvaluateVerb,
    "envs": EnvsVerb,
    "bench": BENCH,
    "runs": RunsVerb,
    "compare": CompareVerb,
    "report": ReportVerb,
    "plot": PlotVerb,
    "dashboard": DashboardVerb,
    "tune": TuneVerb,
    "export": ExportVerb,
    "submit": SubmitVerb,
    "launch": LaunchVerb,
    "cluster": CLUSTER,
    "jobs": JobsVerb,
    "logs": LogsVerb,
    "cancel": CancelVerb,
    "fetch": FetchVerb,
    "status": StatusVerb,
    "doctor": DoctorVerb,
}


class Parser(argparse.ArgumentParser):
    appendix = ""
    """More text for `--help`, printed as it is."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        _complain(f"{message} (see {self.prog} --help)")
        raise SystemExit(BAD_INPUT)

    def refuse(self, parsed: argparse.Namespace, unknown: Sequence[str]) -> NoReturn:
        """Complain about words that the verb does not take, and say what may have been meant."""
        from paceline.commands.suggestions import meant

        wanted = meant(parsed.verb, unknown, getattr(parsed, "settings:algo", None))
        hint = f"; did you mean {wanted}?" if wanted else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def format_help(self) -> str:
        return super().format_help() + self.appendix

    @property
    def version(self) -> str:
        """Read by `--version`; looking it up takes too long for other commands."""
        from paceline import __version__

        return f"paceline {__version__}"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = make_parser(arguments)
        parsed, unknown = parser.parse_known_args(arguments or ["--help"])
        if unknown:
            parsed.parser.refuse(parsed, unknown)
        verb = make_verb(parsed.verb, parsed)
    except SystemExit as ended:  # after --help, --version or an error in the flags
        raise SystemExit(_flushed(int(ended.code or 0))) from None
    except Exception as error:
        raise SystemExit(_print_error(error)) from None
    raise SystemExit(_flushed(_run(verb)))


def _run(verb: Verb) -> int:
    try:
        return verb.run()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return CTRL_C
    except BrokenPipeError:
        pass
    except SystemExit as error:  # an environment's, for instance: no verb ends like this
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f"{last.filename}, line {last.lineno}"
        _complain(f"failed: sys.exit({error.code!r}) was called in {where}")
    except Exception as error:
        return _print_error(error)
    return FAILED


def _flushed(code: int) -> int:
    """The exit code, once all output is written. A reader may have gone, as in `paceline … | head -1`; Python would
    complain about that at its exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # where standard output is no file, as in tests
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def make_parser(arguments: Sequence[str] | None = None) -> Parser:
    """The parser of all verbs. With the words of a command line, only the verb they name has its flags."""
    about = "Train, evaluate and compare deep-RL agents, from a laptop to a cluster."
    parser = Parser(prog="paceline", description=about)
    parser.add_argument("--version", action="version")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _check_verb(parser, VERBS, arguments)
    _add_verbs(verbs, VERBS, arguments)
    return parser


def _check_verb(parser: Parser, verbs: Mapping[str, object], arguments: Sequence[str] | None) -> None:
    word = next(iter(arguments or ()), "--help")
    if word not in verbs and not word.startswith("-"):
        from paceline.config.values import did_you_mean

        hint = did_you_mean(word, list(verbs)) or f"; there are {', '.join(verbs)}"
        parser.error(f"there is no verb {word!r}{hint}")


def _add_verbs(parsers: Any, verbs: Mapping[str, type[Verb] | VerbGroup], arguments: Sequence[str] | None) -> None:
    for name, verb in verbs.items():
        about, _, more = (verb.about if isinstance(verb, VerbGroup) else verb.__doc__ or "").partition("\n\n")
        parser: Parser = parsers.add_parser(name, help=about, description=" ".join((more or about).split()))
        rest = None if arguments is None else arguments[1:] if arguments[:1] == [name] else []
        if isinstance(verb, VerbGroup):
            word = verb.metavar
            _check_verb(parser, verb.verbs, rest)
            _add_verbs(parser.add_subparsers(title=f"{word.lower()}s", metavar=word, required=True), verb.verbs, rest)
            continue
        parser.set_defaults(verb=verb, parser=parser)
        if arguments is None or arguments[:1] == [name]:
            _add_options(parser, verb)
            if not {"-h", "--help"}.isdisjoint(rest or ()):
                parser.appendix = verb.epilog(rest or ())


def _add_options(parser: Parser, verb: type[Verb]) -> None:
    parser.usage = verb.usage
    group: dict[str, argparse._ArgumentGroup] = {}
    for heading, fields in verb.groups.items():
        title, _, description = heading.partition(": ")
        group |= dict.fromkeys(fields, parser.add_argument_group(title, description))
    for option in options(verb):
        option.add_to(group.get(option.field, parser))


def _print_error(error: Exception) -> int:
    """One line, after a traceback if paceline did not foresee the error; the exit code."""
    from paceline.config import UserError, printable

    own = type(error).__module__.startswith("paceline.")
    if isinstance(error, UserError):
        _complain(str(error))
        return BAD_INPUT
    if isinstance(error, OSError) and not own:
        where = f" ({error.filename})" if error.filename else ""
        advice = "check the disk and the folder; --resume continues a run from its last checkpoint"
        _complain(f"failed: {error.strerror or error}{where}: {advice}")
        return FAILED
    if not own:
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    name = "" if own else f"{type(error).__name__}: "
    _complain(f"failed: {name}{error}")
    return FAILED


def _complain(text: str) -> None:
    """Print a line about what went wrong. It may quote an env's error, which may hold a terminal's commands."""
    from paceline.config import printable
    from paceline.config.values import shortened

    print(f"paceline: {shortened(printable(' '.join(text.split())), MAX_LINE)}", file=sys.stderr)


if __name__ == "__main__":
    main()
