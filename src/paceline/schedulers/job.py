"""What a user asks a scheduler for."""

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
    """The resources of a job, from the command line and a site's profile. None or empty: the scheduler's default."""

    name: str = "paceline"
    """Name of the job in the queue."""
    nodes: Positive = 1
    """Number of hosts, without the one that `learner_gpus` adds."""
    cores: Positive | None = None
    """Cores per host; by default all, and the host alone."""
    gpus: NotNegative = 0
    """GPUs per host."""
    memory: str | None = None
    """Memory per host, such as 16G or 500M."""
    walltime: Duration = 3600
    """Time limit of the job (30m, 1h30m, 01:30:00)."""
    account: str | None = None
    """Account or project to charge."""
    queue: str | None = None
    """Queue or partition."""
    qos: str | None = None
    """Quality of service (SLURM)."""
    constraint: str | None = None
    """Required host features: SLURM's constraint, OAR's properties, part of a PBS chunk, Cobalt's attributes."""
    mail: str | None = None
    """Address to notify when the job starts and ends."""
    after: tuple[str, ...] = ()
    """Id or name of a job that must succeed first (on OAR: end)."""
    extra: tuple[str, ...] = ()
    """An additional directive, verbatim, without the scheduler's prefix."""
    attempts: Positive = 20
    """Maximum number of starts: a job that is stopped early (exit code 99) starts again and resumes."""
    save: Duration = 120
    """How long before the end of the walltime the command is told to save and stop."""
    learner_gpus: NotNegative = 0
    """Add a first host with this many GPUs, which runs COMMAND (SLURM, PBS)."""
    learner_cores: Positive | None = None
    """Cores of the learner's host; by default `cores`."""
    learner_memory: str | None = None
    """Memory of the learner's host."""
    learner_queue: str | None = None
    """Queue of the learner's host; by default `queue` (SLURM)."""
    learner_constraint: str | None = None
    """Required features of the learner's host."""

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("use a letter, then letters, digits and . _ + -")
        return value

    @field_validator("memory", "learner_memory")
    @classmethod
    def _known_unit(cls, value: str | None) -> str | None:
        if value is not None and not _MEMORY.fullmatch(value):
            raise ValueError("give a number with M, G or T, such as 16G")
        return value

    @field_validator("account", "queue", "qos", "constraint", "mail", "learner_queue", "learner_constraint")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or not value.isprintable()):
            raise ValueError("give text in one line")
        return value

    @field_validator("after", "extra")
    @classmethod
    def _lines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            cls._one_line(value)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if self.save >= self.walltime:
            raise ValueError(f"save={self.save} s must be less than walltime={self.walltime} s; lower save")
        if not self.learner_gpus:
            for name in ("learner_cores", "learner_memory", "learner_queue", "learner_constraint"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} needs learner_gpus=1 or more")
        return self

    @property
    def hosts(self) -> int:
        """Number of hosts, with the learner's."""
        return self.nodes + (self.learner_gpus > 0)

    @property
    def components(self) -> list[Job]:
        """One job for each kind of host; the learner's comes first, because the script runs on the first host."""
        if not self.learner_gpus:
            return [self]
        learner = {
            "nodes": 1,
            "gpus": self.learner_gpus,
            "cores": self.learner_cores or self.cores,
            "memory": self.learner_memory,
            "queue": self.learner_queue or self.queue,
            "constraint": self.learner_constraint,
        }
        return [self.model_copy(update=learner), self]
