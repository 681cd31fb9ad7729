"""The command line: `vcpo`."""

import os
import signal


def command() -> None:
    """Run `vcpo`. Ctrl-C while its modules are imported ends it with 130, and no traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from vcpo.cli.main import app

    signal.signal(signal.SIGINT, before)
    app()
