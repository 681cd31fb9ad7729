"""The process in which a model's Python runs; `runner` starts this text as `python -c`.

It becomes nobody if it is root, takes its limits, and runs the program from its standard input.
"""

import contextlib
import json
import os
import resource
import select
import sys
import traceback

NOBODY = 65_534
"""User and group id without rights."""


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit this process for good: time, memory, size of files, and no new process or thread."""
    # At the soft limit the program gets SIGXCPU; one that ignores it ends at the hard limit.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counted per user: a limit of 0 is already reached and allows no new process or thread.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _tell_worker(descriptor: int) -> None:
    """Tell the worker that the program starts; end now if the worker is dead.

    descriptor: a socket, of which the worker has the other end.
    """
    worker = select.poll()
    worker.register(descriptor, 0)  # that the other end is closed is always reported
    if worker.poll(0):  # it died before this process was bound to its parent's death
        sys.exit(1)
    os.write(descriptor, b"1")
    os.close(descriptor)


def _run(source: str) -> int:
    """Run the program as a script; print its exception without this file's frames."""
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the model sees any exception
        with contextlib.suppress(OSError):  # the output comes before the error
            sys.stdout.flush()
        own_frame = error.__traceback__
        error.__traceback__ = own_frame.tb_next if own_frame else None
        traceback.print_exception(error)
        return 1
    return 0


def main() -> int:
    """Give up root's rights, take the limits, and run the program."""
    settings = json.loads(sys.argv.pop())
    source = sys.stdin.buffer.read().decode()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    limit(**settings["limits"])
    _tell_worker(settings["worker_socket"])
    return _run(source)


if __name__ == "__main__":
    sys.exit(main())
