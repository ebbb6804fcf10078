"""Every error a user can meet, each with its exit code of the command line.

An error has one message: what was given, what is required, what to change.
The command line prints the message, never a traceback, and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ToolkitError(Exception):
    """Base of all errors that are shown to a person as one message."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Show only the message in a notebook (a hook of IPython)."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Problem:
    """One problem with the input: where it is and what to do about it."""

    where: str
    """Key path, file or option, e.g. `train.global_batch`."""
    what: str
    """What was given, what is required, what to change."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class BadInput(ToolkitError, ValueError):
    """The input can't be used; nothing was started and nothing was lost."""

    exit_code = 2

    def __init__(self, source: str, problems: Sequence[Problem] | str) -> None:
        self.source = source
        self._given = problems
        self.problems = (Problem(source, problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__(self._message(single=isinstance(problems, str)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, so that one rank can send the error to the others."""
        given = self._given
        return {
            "source": self.source,
            "problems": given if isinstance(given, str) else [[p.where, p.what] for p in given],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BadInput:
        """Return the error that `to_json` has described."""
        problems = fields["problems"]
        return cls(fields["source"], problems if isinstance(problems, str) else [Problem(*each) for each in problems])

    def _message(self, *, single: bool) -> str:
        if single:
            return str(self.problems[0])
        count = len(self.problems)
        lines = [f"{self.source}: {count} problem{'s' if count > 1 else ''}"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


class NoPlanFits(ToolkitError):
    """Every plan was refused."""

    exit_code = 3


class NotRehearsable(ToolkitError):
    """The plan needs something that can't be faked; the message names it."""

    exit_code = 3


class RankFailed(ToolkitError):
    """A worker process ended with an error."""

    exit_code = 4
    stopped = False
    """Whether the run had been asked to stop: then it is not restarted."""


class OutOfMemory(RankFailed):
    """A rank ran out of device memory."""


class HostLost(RankFailed):
    """A host was lost together with its ranks."""

    def __init__(self, text: str, hosts: Sequence[str]) -> None:
        super().__init__(text)
        self.hosts = tuple(hosts)


class CheckpointFailed(RankFailed):
    """A checkpoint could not be written; earlier ones are untouched."""


class LossNotFinite(ToolkitError):
    """The loss or a gradient became NaN or infinite."""

    exit_code = 5


class Preempted(ToolkitError):
    """The run was asked to stop and saved a checkpoint first."""

    exit_code = 75


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
