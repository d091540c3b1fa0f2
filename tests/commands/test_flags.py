from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal

import pytest

from paceline.commands.flags import Argument, Flag, Option, SettingFlags, Verb, VerbGroup, make_verb, options, words
from paceline.commands.main import VERBS, Parser, make_parser
from paceline.config import RunConfig, UserError


def verbs() -> Iterator[tuple[str, type[Verb]]]:
    for name, verb in VERBS.items():
        if isinstance(verb, VerbGroup):
            yield from ((f"{name} {below}", each) for below, each in verb.verbs.items())
        else:
            yield name, verb


EVERY = dict(verbs())
FLAGS = """
bench scaling: --after --account --algos --attempts --config --constraint --cores --dry-run --engines --envs --extra
  --gpus --hosts --iterations --learner-constraint --learner-cores --learner-gpus --learner-memory --learner-queue
  --mail --max-time --memory --nodes --on --out --partition --preset --profile --property --qos --queue --rehearse
  --retry --save --scaling --seeds --set --stop-return --study --threshold --total-steps --walltime --workers
bench forecast: --bandwidth --cores --hold-out --json --latency --nodes --out --workers
bench suite: --algos --dry-run --episodes --games --out --retry --seeds --set --suite --total-steps
bench throughput: --algo --config --engine --env --max-time --out --preset --profile --set --workers
cancel:
cluster attach:
cluster dashboard: --port
cluster down: --purge
cluster status:
cluster tensorboard: --port
cluster up:
compare: --at --by --metric --mixed --out --range --threshold
dashboard: --port
doctor: --hosts --interface --out
envs: --set
evaluate: --checkpoint --constant --episodes --levels --random --render --seed --set --stochastic --video
export: --checkpoint --format --output -o
fetch:
jobs: --all
launch: --container --cpus --dashboard --hosts --interface --keep --log --min-nodes --nodes --port --ports --rehearse
  --timeout
logs: --follow -f
plot: --output --smooth -o
report: --format --out --timeline --title -o
runs: --json
status: --every --watch
submit: --account --after --at-once --attempts --constraint --cores --dry-run --extra --gpus --interactive
  --learner-constraint --learner-cores --learner-gpus --learner-memory --learner-queue --mail --memory --name --nodes
  --on --partition --profile --property --qos --queue --save --seeds --walltime --yes
train: --algo --config --device --engine --env --envs-per-worker --init-from --iterations --keep-schedule --max-time
  --name --out --preset --quiet --resume --seed --seeds --set --stop-return --threads --total-steps --workers
tune: --algo --config --device --env --envs-per-worker --gpus --interval --iterations --max-time --metric --mode --name
  --out --parallel --preset --resume --retry --search --seed --seeds --set --space --stop-after --stop-return
  --threads --total-steps --trials
"""


def test_the_flags_of_every_verb_are_a_contract() -> None:
    """Scripts rely on these names: a flag may be added, none may go."""
    lines = re.sub(r"\n\s+", " ", FLAGS.strip()).splitlines()
    expected = {verb: set(names.split()) for verb, names in (line.split(":", 1) for line in lines)}
    assert {verb: {name for option in options(cls) for name in option.names} for verb, cls in EVERY.items()} == expected


@pytest.mark.parametrize("name", EVERY)
def test_every_flag_is_explained(name: str, cli: Any) -> None:
    result = cli(*name.split(), "--help")
    assert result.code == 0 and result.out.startswith(f"usage: paceline {name}") and result.err == ""
    text = " ".join(result.out.split())
    for option in options(EVERY[name]):
        assert option.help.endswith("."), option
        assert all(flag in text for flag in option.names) and option.help.split("/")[0][:40] in text, option


@pytest.mark.parametrize("name", EVERY)
def test_every_flag_reaches_its_reader(name: str) -> None:
    cls = EVERY[name]
    given = [(option, sample(option)) for option in options(cls)]
    line = [word for option, value in sorted(given, key=is_positional) for word in typed(option, value)]
    made = make_verb(cls, make_parser([*name.split()]).parse_args([*name.split(), *line]))
    for option, value in given:
        held = getattr(made, option.field)
        assert (held[option.setting] if option.setting else held) == value, option
    source = "".join(inspect.getsource(base) for base in cls.__mro__[:-1] if base is not Verb)
    decided = {option.field for option in options(cls) if len(option.keywords.get("choices", "two")) == 1}
    for field in fields(cls):
        assert field.name in decided or re.search(rf'self\.{field.name}\b|"{field.name}"|vars\(self\)', source), (
            f"nothing reads {field.name}"
        )


def sample(option: Option) -> Any:
    keywords = option.keywords
    if keywords.get("action") == "store_true":
        return True
    value = keywords["choices"][-1] if "choices" in keywords else keywords.get("type", str)("7")
    if keywords.get("action") == "append":
        return [value, value] if option.setting else (value, value)
    return (value, value) if keywords.get("nargs") in ("+", "...") else value


def typed(option: Option, value: Any) -> list[str]:
    flag = list(option.names[-1:])
    values = [str(each) for each in (value if isinstance(value, (list, tuple)) else [value])]
    if value is True:
        return flag
    return [word for each in values for word in (*flag, each)] if flag else values


def is_positional(pair: tuple[Option, Any]) -> tuple[bool, bool]:
    return not pair[0].names, pair[0].keywords.get("nargs") == "..."


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="toy")
    for option in options(Toy):
        option.add_to(parser)
    return parser


def test_help_from_fields(parser: Parser) -> None:
    text = " ".join(parser.format_help().split())
    assert "--step-size X 100 % of a step (default: 0.5)." in text and "--colour {red,blue}" in text
    assert "--env ID" in text and "(default: CartPole-v1)" in text


def test_values_from_a_command_line(parser: Parser) -> None:
    line = ["a", "b", "-k", "3", "--col", "blue", "--tag", "x", "--tag", "y", "--env", "E"]
    made = make_verb(Toy, parser.parse_args(line))
    assert made == Toy(runs=("a", "b"), kind=3, colour="blue", tag=("x", "y"), settings={"env.id": "E"})
    made = make_verb(Toy, parser.parse_args(["a", "--kind", "4"]))
    assert made == Toy(runs=("a",), kind=4, settings={}) and made.step_size == 0.5


@pytest.mark.parametrize(
    "value, bound", [("-1", "must be at least 0"), ("1.5", "must be at most 1"), ("nan", "expected a finite number")]
)
def test_bounds(value: str, bound: str, parser: Parser) -> None:
    with pytest.raises(UserError, match=f"--step-size {value}: {bound}"):
        make_verb(Toy, parser.parse_args(["a", "-k", "1", f"--step-size={value}"]))


def test_the_command_after_two_dashes() -> None:
    for line in (["--nodes", "1", "--", "b", "--", "-c"], ["--nodes", "1", "b", "--", "-c"]):
        made: Any = make_verb(EVERY["launch"], make_parser(["launch"]).parse_args(["launch", *line]))
        assert made.nodes == 1 and made.command == ("b", "--", "-c")


def test_words_give_the_same_verb_again(parser: Parser) -> None:
    toy = Toy(runs=("a",), kind=0, dry_run=True, tag=("x", "y"), settings={"env.id": "E"})
    line = words(toy, "settings", "tag", "colour", "dry_run", "kind")
    assert line == ["--env", "E", "--tag", "x", "--tag", "y", "--dry-run", "-k", "0"]
    assert make_verb(Toy, parser.parse_args(["a", *line])) == toy


@pytest.mark.parametrize("line", ["a", "a -k x", "a -k 1 --colour green", "-k 1", "a -k 1 --no-such"])
def test_bad_input_is_one_line(line: str, parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(line.split())
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


class Toy(Verb):
    runs: Annotated[tuple[str, ...], Argument("RUN")]
    kind: Annotated[int, Flag("K", also=("-k",))]
    step_size: Annotated[float, Flag("X", least=0, most=1)] = 0.5
    """100 % of a
    step."""
    colour: Literal["red", "blue"] | None = None
    dry_run: bool = False
    tag: Annotated[tuple[str, ...], Flag("T")] = ()
    settings: Annotated[dict[str, Any], SettingFlags(RunConfig, {"env.id": ("--env",)})]

    def run(self) -> int:
        return 0
