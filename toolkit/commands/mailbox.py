"""`toolkit mailbox`: where islands of several sites meet that never wait for one another."""

from __future__ import annotations

import argparse
import signal
import threading

from toolkit.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=29400, metavar="P", help="port; 0: any free one (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until it is asked to stop. What it holds is lost then; islands go on from their checkpoints."""
    from toolkit.runtime.islands.async_store import serve

    try:
        store = serve(args.bind, args.port)
    except Exception as error:
        raise BadInput("--port", f"can't listen at {args.bind}:{args.port}: {error}; choose another") from None
    print(
        f"mailbox at {args.bind}:{store.port}; give it to every island: --mailbox {args.bind}:{store.port}", flush=True
    )
    print("nothing here is encrypted or asks who you are: listen on a private network only", flush=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(0.5):
        pass
    return 0
