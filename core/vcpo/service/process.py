"""A process of ours: its command, its first moment and its last. It imports little: it is first."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import NoReturn


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours, without the current folder on its import path.

    A file of the user's that is called like a library would replace it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def run_service(module: str) -> NoReturn:
    """Run the `main` of a module, and end the process with the status that it returns."""
    end_with(lambda: import_module(module).main())


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the status that a function returns; None is 0.

    The import takes seconds. Until the service has a handler of its own, SIGTERM ends it with 143:
    nothing is there to save, and the kernel drops the signal where the first process of a container
    has no handler. At the end no thread, server or exit handler can keep the process.
    """
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter would show it as well
        sys.excepthook(*sys.exc_info())
        status = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":  # MODULE ARGUMENTS, for a main of somebody else's
    run_service(sys.argv.pop(1))
