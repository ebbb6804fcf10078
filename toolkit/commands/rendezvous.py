"""`toolkit rendezvous`: serve the update store through which asynchronous islands of several sites exchange updates."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.units import GIB

LARGEST_PORT = 65535
KEYS = "mailbox-keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=29400, metavar="P", help="port; 0 picks a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        default=Path(KEYS),
        metavar="DIR",
        help="directory of the server's keys; made if it is absent (default: %(default)s)",
    )
    parser.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="only make keys: the islands' secret, the server's certificate",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="further name or address under which islands reach the server; part of a new certificate",
    )
    parser.add_argument(
        "--encrypt",
        action="store_true",
        help="new keys: islands encrypt values before they send them; buckets and folders hold no plain weights",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=8.0,
        metavar="G",
        help="memory for values (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal. The updates in the store are lost then; islands resume from their checkpoints."""
    if not 0 <= args.port <= LARGEST_PORT:
        raise BadInput("--port", f"{args.port} given; 0 to {LARGEST_PORT} is required, and 0 picks a free one")
    if not args.memory_gib > 0:
        raise BadInput("--memory-gib", f"{args.memory_gib} given; more than 0 is required")
    from toolkit.runtime.islands.store_access import ISLANDS_KEY, make_keys

    hosts = list(dict.fromkeys([args.bind, "127.0.0.1", "localhost", *args.host]))
    if args.init is not None:
        make_keys(args.init, hosts, encrypts=args.encrypt)
        print(f"keys written to {args.init}: copy {ISLANDS_KEY} to every island; the rest stays here", flush=True)
        return 0
    if not args.keys.exists():
        make_keys(args.keys, hosts, encrypts=args.encrypt)
    elif args.encrypt:
        raise BadInput("--encrypt", f"is for new keys; {args.keys} holds some already: name another directory")
    return _serve(args, args.keys / ISLANDS_KEY)


def _serve(args: argparse.Namespace, key: Path) -> int:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise BadInput("--bind", "a server needs the package aiohttp: pip install 'zero-toolkit[islands]'") from None
    from toolkit.runtime.islands.store_access import StoreServer

    server = StoreServer(args.bind, args.port, args.keys, int(args.memory_gib * GIB))

    def ready(port: int) -> None:
        address = f"https://{args.bind}:{port}"
        print(f"listening on {address}; start every island with --rendezvous {address} --mailbox-key {key}", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    try:
        server.run(ready)
    except OSError as error:
        what = f"can't listen on {args.bind}:{args.port}: {error.strerror or error}; choose another port"
        raise BadInput("--port", what) from None
    return 0
