"""Hostfiles in DeepSpeed's format (`NAME slots=N`, one host per line), and the hosts and slots a run uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import BadInput, Problem
from toolkit.recipe.schema import show

MOST_SLOTS = 1024
MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
"""Host names and addresses; excludes everything that ssh or a shell could read as an option or a command."""
_LINE = re.compile(r"(\S+)[ \t]+slots=([0-9]{1,6})")
_CHOICE = re.compile(r"([^:]+?)(?::([0-9]{1,6}(?:,[0-9]{1,6})*))?")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the devices on it that a run uses."""

    name: str
    """Name or address, as given to ssh."""
    slots: tuple[int, ...]
    """Indices of the devices."""


def read_hostfile(path: Path, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the selected hosts of a file, in file order; raise `BadInput` with every problem at once."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInput("--hostfile", f"{path} can't be read: {error.strerror}") from None
    try:
        text = raw[: MOST_BYTES + 1].decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput("--hostfile", f"{path} is not text; lines of NAME slots=N are required") from None
    if len(raw) > MOST_BYTES:
        raise BadInput("--hostfile", f"{path} has {len(raw):,} bytes; at most {MOST_BYTES:,} are read")
    return select(parse(text, str(path)), include, exclude)


def parse(text: str, source: str) -> tuple[Host, ...]:
    """Return every host of a hostfile's text."""
    hosts: dict[str, Host] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip(" \t\r")
        if words:
            _read_line(f"line {number}", words, hosts, problems)
    if not hosts and not problems:
        problems.append(Problem("hosts", "none given; add a line NAME slots=N for each host"))
    if problems:
        raise BadInput(source, problems)
    return tuple(hosts.values())


def _read_line(where: str, words: str, hosts: dict[str, Host], problems: list[Problem]) -> None:
    match = _LINE.fullmatch(words)
    if not match:
        problems.append(Problem(where, f"{show(words)} given; NAME slots=N is required, with a number of at least 1"))
        return
    name, slots = match[1], int(match[2])
    if not is_host_name(name):
        what = f"{show(name)} is not a host name or address; letters, digits, . _ - (and : in IPv6) are allowed"
        problems.append(Problem(where, what))
    elif not 1 <= slots <= MOST_SLOTS:
        problems.append(Problem(where, f"{slots} slots given for {name}; 1 to {MOST_SLOTS} are required"))
    elif name in hosts:
        problems.append(Problem(where, f"duplicate host {name}; give each host one line with all of its slots"))
    else:
        hosts[name] = Host(name=name, slots=tuple(range(slots)))


def is_host_name(name: str) -> bool:
    """Return whether a word is a valid host name or address."""
    return bool(_NAME.fullmatch(name)) and name.isascii()


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the hosts and slots selected by `--include` or left by `--exclude`, each written `host-1@host-2:0,2`."""
    if include and exclude:
        raise BadInput("--include", "can't be combined with --exclude; give one of them")
    if include:
        wanted = _choices("--include", include, hosts)
        kept = [replace(host, slots=wanted[host.name]) for host in hosts if host.name in wanted]
    else:
        dropped = _choices("--exclude", exclude, hosts) if exclude else {}
        left = [(host, tuple(slot for slot in host.slots if slot not in dropped.get(host.name, ()))) for host in hosts]
        kept = [replace(host, slots=slots) for host, slots in left if slots]
    if not kept:
        raise BadInput("--exclude", "no host is left; exclude fewer")
    return tuple(kept)


def _choices(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = _CHOICE.fullmatch(part)
        name = match[1] if match else part
        if match is None or name not in known:
            what = f"{show(part)} given; hosts of the hostfile as HOST@HOST:SLOT,SLOT are required: {', '.join(known)}"
            raise BadInput(option, what)
        slots = tuple(int(slot) for slot in match[2].split(",")) if match[2] else known[name].slots
        absent = [slot for slot in slots if slot not in known[name].slots]
        if absent or len(set(slots)) != len(slots) or name in chosen:
            what = f"{show(part)} given; each slot once, out of 0 to {len(known[name].slots) - 1}, is required"
            raise BadInput(option, what)
        chosen[name] = slots
    return chosen


def even_slots(hosts: Sequence[Host]) -> int:
    """Return the number of devices per host; raise `BadInput` if hosts differ, because plans assume equal hosts."""
    counts = {host.name: len(host.slots) for host in hosts}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{name}: {count}" for name, count in counts.items())
        what = f"hosts with different numbers of slots ({given}); use --include to select equally many on each"
        raise BadInput("--hostfile", what)
    return len(hosts[0].slots)
