"""`toolkit rendezvous`: serve the update store through which asynchronous islands of several sites exchange updates."""

from __future__ import annotations

import argparse
import signal
import threading

from toolkit.errors import BadInput

LARGEST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=29400, metavar="P", help="port; 0 picks a free one (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal. The updates in the store are lost then; islands resume from their checkpoints."""
    if not 0 <= args.port <= LARGEST_PORT:
        raise BadInput("--port", f"{args.port} given; 0 to {LARGEST_PORT} is required, and 0 picks a free one")
    from toolkit.runtime.islands.async_store import serve

    try:
        store = serve(args.bind, args.port)
    except Exception as error:
        what = f"can't listen on {args.bind}:{args.port}: {error}; choose another port"
        raise BadInput("--port", what) from None
    address = f"{args.bind}:{store.port}"
    print(f"listening on {address}; start every island with --rendezvous {address}", flush=True)
    print("connections are neither encrypted nor authenticated: use a private network only", flush=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(0.5):
        pass
    return 0
