"""What one asks a scheduler for."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.config import Positive, Section, parse_count, parse_seconds

_NAME = re.compile(r"[A-Za-z][\w.+-]*")
_MEMORY = re.compile(r"\d+[MGT]")


def _whole_seconds(value: object) -> object:
    seconds = parse_seconds(value)
    return int(seconds) if isinstance(seconds, float) else seconds


Duration = Annotated[int, BeforeValidator(_whole_seconds), Field(ge=1)]
NotNegative = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]


class Job(Section):
    """A job as the command line and a site's profile describe it. None and empty: the scheduler's own default."""

    name: str = "paceline"
    """Of the job, in the queue."""
    nodes: Positive = 1
    """Hosts; that of `learner_gpus` comes on top."""
    cores: Positive | None = None
    """Of each host; all of them if not given."""
    gpus: NotNegative = 0
    """Of each host."""
    memory: str | None = None
    """Of each host, as 16G or 500M."""
    walltime: Duration = 3600
    """How long the job may take (30m, 1h30m, 01:30:00)."""
    account: str | None = None
    """Who pays: the account or project."""
    queue: str | None = None
    """Queue, or partition."""
    qos: str | None = None
    """Quality of service (SLURM)."""
    constraint: str | None = None
    """What the hosts must be: SLURM's constraint, OAR's properties, a part of PBS's chunk, Cobalt's attributes."""
    mail: str | None = None
    """Address to be told when the job begins and ends."""
    after: tuple[str, ...] = ()
    """Ids of jobs that have to end before."""
    extra: tuple[str, ...] = ()
    """Further directives, verbatim: what stands behind #SBATCH, #OAR, #PBS or #COBALT."""
    attempts: Positive = 20
    """How often it may start in all: a job that was stopped early (exit code 99) starts again and resumes."""
    save: Duration = 120
    """So long before the end of the walltime the command is told to save and stop."""
    learner_gpus: NotNegative = 0
    """One more host, with so many GPUs, first of all: COMMAND runs there (SLURM, PBS)."""
    learner_cores: Positive | None = None
    """Of that host; as `cores` if not given."""
    learner_memory: str | None = None
    """Of that host."""
    learner_queue: str | None = None
    """Of that host; as `queue` if not given (SLURM)."""
    learner_constraint: str | None = None
    """Of that host."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a letter, then letters, digits and . _ + -")
        return value

    @field_validator("memory", "learner_memory")
    @classmethod
    def _known_unit(cls, value: str | None) -> str | None:
        if value is not None and not _MEMORY.fullmatch(value):
            raise ValueError("a number with M, G or T, such as 16G")
        return value

    @field_validator("account", "queue", "qos", "constraint", "mail", "learner_queue", "learner_constraint")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or not value.isprintable()):
            raise ValueError("some text in one line")
        return value

    @field_validator("after", "extra")
    @classmethod
    def _lines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            cls._one_line(value)
        return values

    @model_validator(mode="after")
    def _time_to_work(self) -> Job:
        if self.save >= self.walltime:
            text = f"save={self.save} s before the end leaves nothing of walltime={self.walltime} s"
            raise ValueError(f"{text}; lower save")
        if not self.learner_gpus:
            for name in ("learner_cores", "learner_memory", "learner_queue", "learner_constraint"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} needs learner_gpus=1 or more")
        return self

    @property
    def hosts(self) -> int:
        """How many there will be."""
        return self.nodes + (self.learner_gpus > 0)
