"""The process in which a model's Python runs; started by `sandbox`, never imported.

It gives up what it can, in this order, and then runs the program from its standard input:

network     a network namespace without any device (Linux, where the system lets it)
files       Landlock: it reads the interpreter's own files, and writes to its folder (Linux 5.13)
processes   Landlock: no TCP, no signal to others (Linux 6.7, 6.12); and no new process or thread
root        where the parent is root, the rights of nobody
limits      CPU time, memory, size of files, open files; none can be raised again

What the system refuses is left out, and told to the parent when it asks. This guards against a
program's mistakes and mischief; where programs may be hostile, it stands inside a sandbox for pods
(gVisor, Kata).
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback

# Numbers of linux/landlock.h, linux/sched.h and linux/prctl.h; the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_O_PATH = 0o10000000
_NO_NEW_PRIVILEGES, _KEEP_CAPABILITIES = 38, 8
_CAPABILITY_VERSION, _READ_SEARCH = 0x20080522, 1 << 2
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE
# By version of the interface, from 1 on: every right over files that the kernel knows to refuse.
_FILE_RIGHTS = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
_TCP_RIGHTS = 0b11
_SCOPES = 0b11

_READABLE = (
    sys.base_prefix,
    sys.base_exec_prefix,
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _leave_network() -> bool:
    """Whether the system does it: it takes a right of root, or a user namespace."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    return bool(_libc.unshare(flags) == 0)


def _restrict_files(folder: str) -> bool:
    """Whether the system does it."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]
    asked = _Ruleset(rights, _TCP_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(asked), ctypes.c_size_t(size), 0)
    for path in _READABLE:
        _allow(ruleset, path, _READ)
    _allow(ruleset, folder, rights & ~_EXECUTE)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    status = _libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return bool(status == 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        parent = os.open(path, _O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & _ON_FILES  # noqa: PTH112 - no pathlib
        rule = _PathBeneath(allowed, parent)
        _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)


def _drop_root(nobody: int, *, keep_reading: bool) -> None:
    """Become nobody; one who may read what root may, where Landlock says what that is.

    An interpreter in root's home would find none of its modules otherwise.
    """
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setgid(nobody)
    _libc.prctl(_KEEP_CAPABILITIES, int(keep_reading), 0, 0, 0)
    os.setuid(nobody)
    if keep_reading:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        kept = (ctypes.c_uint32 * 6)(_READ_SEARCH, _READ_SEARCH)
        if _libc.capset(header, kept) != 0:  # never had it: nothing is kept then
            _libc.capset(header, (ctypes.c_uint32 * 6)())


def _limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    # Above the soft limit comes a signal that says why; the hard one is for who ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counted per user, so that any number that is reached already allows no further one.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _run(source: str) -> int:
    """Run the program as a script; what it raises is shown without this file's frames."""
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the model is told
        with contextlib.suppress(OSError):  # else it would stand behind the error
            sys.stdout.flush()
        own_frame = error.__traceback__
        error.__traceback__ = own_frame.tb_next if own_frame else None
        traceback.print_exception(error)
        return 1
    return 0


def main() -> int:
    """Give up rights, then run; or print which could not be given up."""
    settings = json.loads(sys.argv.pop())
    source = sys.stdin.buffer.read().decode()
    is_offline = is_restricted = False
    if sys.platform == "linux":
        is_offline = _leave_network()
        is_restricted = _restrict_files(settings["folder"])
    if settings["reports"]:
        kept = {"network": is_offline, "files": is_restricted}
        sys.stdout.write(json.dumps([name for name, holds in kept.items() if not holds]))
        return 0
    _drop_root(settings["nobody"], keep_reading=is_restricted)
    _limit(settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"])
    return _run(source)


if __name__ == "__main__":
    sys.exit(main())
