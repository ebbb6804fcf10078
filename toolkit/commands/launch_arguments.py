"""Arguments of commands that start a run: launcher, hosts, restarts and islands.

Apart from `common`, because planning needs none of what they import, and must start at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.launching import environment, launchers
from toolkit.launching.hostfile import Host, read_hostfile
from toolkit.run_dir.async_islands import KEY, parse_address
from toolkit.sessions.hosts import LaunchOptions
from toolkit.sessions.islands import IslandOptions


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `LaunchOptions`: launcher, hosts, restarts and islands."""
    parser.add_argument(
        "--launcher",
        choices=launchers.LAUNCHERS,
        default="local",
        help="what starts the workers (default: local, toolkit itself)",
    )
    parser.add_argument(
        "--hostfile", type=Path, metavar="F", help="train on these hosts over ssh; one line `NAME slots=N` per host"
    )
    parser.add_argument(
        "--include", default="", metavar="HOSTS", help="use only these hosts of the hostfile: HOST@HOST:SLOT,SLOT"
    )
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="use all hosts of the hostfile except these")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a rank fails, restart from the last checkpoint, at most N times; after a second failure without "
        "progress, with fewer processes (default 0)",
    )
    parser.add_argument(
        "--rendezvous",
        "--mailbox",
        metavar="ADDRESS",
        help="with train.outer.mode=async: where islands meet: https://HOST:PORT of `toolkit mailbox`, or a directory "
        "or bucket (file:///DIR, s3://BUCKET/PREFIX, gs://…)",
    )
    parser.add_argument(
        "--mailbox-key",
        type=Path,
        metavar="FILE",
        help=f"key of that store, as `toolkit mailbox --init` writes it (islands.key; default: ${KEY})",
    )
    parser.add_argument(
        "--island", type=int, metavar="K", help="start only this island, counted from 0; needs --rendezvous"
    )


def read_launch_options(args: argparse.Namespace, *, resuming: bool = False) -> LaunchOptions:
    """Read `LaunchOptions` from the arguments."""
    if (args.rendezvous is None) != (args.island is None):
        what = "--island and --rendezvous go together: which island this is, and where it meets the others"
        raise BadInput("--island", what)
    key = _key_file(args, args.rendezvous is not None)
    if (args.rendezvous is None) != (key is None):
        what = "--rendezvous and --mailbox-key go together: where the islands meet, and the secret that lets them in"
        raise BadInput("--mailbox-key", what)
    address = None if args.rendezvous is None else parse_address(args.rendezvous)
    return LaunchOptions(
        launcher=args.launcher,
        hosts=_read_hosts(args),
        max_restarts=args.max_restarts,
        resuming=resuming,
        islands=IslandOptions(address, key, args.island),
    )


def add_join_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--join`, which replaces the recipe."""
    parser.add_argument(
        "--join",
        metavar="ADDRESS",
        help="join the running job of this update store as one more island, of --nproc processes (default: 1); the "
        "store has its recipe, and key=value says what differs here (data.path, for example)",
    )


def read_join_options(args: argparse.Namespace) -> LaunchOptions:
    """Read the options of an island that joins a running job."""
    for name in ("rendezvous", "island", "hostfile"):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name}", "can't be combined with --join, which finds its place in the job by itself")
    if args.tiny:
        raise BadInput("--tiny", "can't be combined with --join: an island trains the model of the job")
    key = _key_file(args, True)
    if key is None:
        raise BadInput("--mailbox-key", f"required with --join: the secret of the job, in a file; or set ${KEY}")
    address = parse_address(args.join)
    return LaunchOptions(
        launcher=args.launcher, max_restarts=args.max_restarts, islands=IslandOptions(address, key, joins=True)
    )


def _key_file(args: argparse.Namespace, needed: bool) -> Path | None:
    """The file with the key of a store: given, or named by the environment."""
    named = environment.environment().get(KEY) if needed else None
    return args.mailbox_key or (Path(named) if named else None)


def _read_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """Read the hosts to train on; empty: this host."""
    if args.hostfile is None:
        given = [option for option in ("include", "exclude") if getattr(args, option)]
        if given:
            raise BadInput(f"--{given[0]}", "selects hosts of a hostfile; give --hostfile, too")
        return ()
    if args.nproc is not None:
        what = "can't be combined with --hostfile, whose slots determine the number of processes; use --include"
        raise BadInput("--nproc", what)
    return read_hostfile(args.hostfile, args.include, args.exclude)
