"""The process in which a model's Python runs; `runner` starts this file and never imports it.

It gives up its rights in this order, and then runs the program from its standard input:

namespaces  its own: no network device, no memory shared with others, and a folder in memory of
            limited size (Linux, as root or with user namespaces)
files       Landlock: it reads the interpreter's own files, and writes to its folder (Linux 5.13)
processes   Landlock: no TCP, no signal to others (Linux 6.7, 6.12); and no new process or thread
root        the child of a root process becomes nobody
limits      CPU time, memory, size of files, open files; it cannot raise them again
parent      it is killed when its parent dies
calls       seccomp: no sockets, not even local ones, no shared memory, no signal to others, no
            mounts or namespaces, no escape from the parent's death (Linux, x86-64 and 64-bit ARM)

It skips a step that the system refuses, and reports the skipped ones if the parent asks. This
protects against mistakes and mischief of programs. Where programs may be hostile, run the workers
in a sandbox for pods (gVisor, Kata).
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import traceback

# Constants of linux/landlock.h, linux/sched.h and linux/prctl.h, equal on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_O_PATH = 0o10000000
_SIGNAL_OF_PARENTS_DEATH, _KEEP_CAPABILITIES, _SET_SECCOMP, _NO_NEW_PRIVILEGES = 1, 8, 22, 38
_CAPABILITY_VERSION, _READ_SEARCH = 0x20080522, 1 << 2
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x40000000
_PRIVATE_MOUNTS = 0x4000 | 0x40000
_NO_SET_UID_NO_DEVICES = 0x2 | 0x4
_DETACH = 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE
# By version of Landlock, from 1 on: all rights over files that the kernel can refuse.
_FILE_RIGHTS = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
_TCP_RIGHTS = 0b11
_SCOPES = 0b11

_MAX_FILES = 4096
"""Most files in a program's folder, where the system limits its size."""

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

# By machine: its constant in linux/audit.h, and the numbers of refused system calls.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED_CALLS = {
    # socket, connect, bind; shmget, semget, msgget, mq_open; ptrace, process_vm_readv and _writev;
    # unshare, setns, mount, umount2, pivot_root, chroot; keyctl, add_key, request_key; bpf,
    # perf_event_open, userfaultfd
    "x86_64": (
        *(41, 42, 49, 29, 64, 68, 240, 101, 310, 311, 272, 308, 165, 166, 155, 161),
        *(250, 248, 249, 321, 298, 323),
    ),
    "aarch64": (
        *(198, 203, 200, 194, 190, 186, 180, 117, 270, 271, 97, 268, 40, 39, 41, 51),
        *(219, 217, 218, 280, 241, 282),
    ),
}
# pidfd_send_signal, io_uring_setup, open_tree to fspick, pidfd_open, pidfd_getfd, mount_setattr.
_REFUSED_EVERYWHERE = (424, 425, 428, 429, 430, 431, 432, 433, 434, 438, 442)
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo: allowed to itself only.
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
_PRCTL = {"x86_64": 157, "aarch64": 167}
_X32_CALLS = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES

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


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _leave_namespaces() -> bool:
    """Enter new namespaces; return whether the system allows it, as root or by user namespace.

    Some systems grant a user namespace but no id map in it (AppArmor on Ubuntu). The process then
    still has no network and no shared memory; only mounts are refused.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_MOUNTS | _NEW_IPC | _NEW_NETWORK
    if os.geteuid() == 0:
        return bool(_libc.unshare(flags) == 0)
    if _libc.unshare(flags | _NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - no pathlib
                file.write(text)
    return True


def _limit_disk(folder: str, user: int, group: int, disk_bytes: int) -> bool:
    """Mount a folder in memory over the one on disk; return whether the system allows it."""
    options = f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=700,uid={user},gid={group}"
    _libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_MOUNTS), None)
    flags = ctypes.c_ulong(_NO_SET_UID_NO_DEVICES)
    if _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode()) != 0:
        return False
    try:
        os.chdir(folder)
    except OSError:  # this user cannot enter the mount
        _libc.umount2(os.fsencode(folder), _DETACH)
        return False
    return True


def _restrict_files(folder: str) -> bool:
    """Restrict file access by Landlock; return whether the system supports it."""
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
    # A path that does not exist or is closed to this user needs no rule.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        parent = os.open(path, _O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & _ON_FILES  # noqa: PTH112 - no pathlib
        rule = _PathBeneath(allowed, parent)
        _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)


def _drop_root(nobody: int, *, keep_reading: bool) -> None:
    """Become nobody; keep root's right to read if Landlock limits what can be read.

    An interpreter in root's home directory could not read its modules otherwise.
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
        if _libc.capset(header, kept) != 0:  # the parent lacked the right: keep nothing
            _libc.capset(header, (ctypes.c_uint32 * 6)())


def _limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    # At the soft limit the program gets SIGXCPU; one that ignores it ends at the hard limit.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counted per user: a limit of 0 is already reached and allows no new process or thread.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _restrict_calls() -> bool:
    """Install the seccomp filter, as the last step; return whether the system supports it."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    instructions = _filter_instructions(machine, os.getpid())
    array = (_Instruction * len(instructions))(*(_Instruction(*one) for one in instructions))
    program = _Filter(len(instructions), array)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0)


def _filter_instructions(machine: str, own_pid: int) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions: (code, jump if true, jump if false, value) each."""
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    first_argument = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    checks = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_CALLS),
        refuse,
    ]
    for number in (*_REFUSED_CALLS[machine], *_REFUSED_EVERYWHERE):
        checks += [(_JUMP_EQUAL, 0, 1, number), refuse]
    for number in _SIGNALS[machine]:
        own = (_JUMP_EQUAL, 0, 1, own_pid)
        checks += [(_JUMP_EQUAL, 0, 4, number), first_argument, own, allow, refuse]
    escape = (_JUMP_EQUAL, 0, 1, _SIGNAL_OF_PARENTS_DEATH)
    checks += [(_JUMP_EQUAL, 0, 3, _PRCTL[machine]), first_argument, escape, refuse]
    return [*checks, allow]


def _run(source: str) -> int:
    """Run the program as a script; print its exception without this file's frames."""
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
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
    """Give up rights, then run the program; or print the unsupported protections as JSON."""
    settings = json.loads(sys.argv.pop())
    source = sys.stdin.buffer.read().decode()
    has_namespaces = has_quota = is_restricted = has_filter = False
    if sys.platform == "linux":
        nobody = settings["nobody"]
        owner = (nobody, nobody) if os.geteuid() == 0 else (os.getuid(), os.getgid())
        has_namespaces = _leave_namespaces()
        has_quota = has_namespaces and _limit_disk(
            settings["folder"], owner[0], owner[1], settings["disk_bytes"]
        )
        is_restricted = _restrict_files(settings["folder"])
    _drop_root(settings["nobody"], keep_reading=is_restricted)
    _limit(settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"])
    if sys.platform == "linux":
        _libc.prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != settings["parent"]:  # it died before the call
            sys.exit(1)
        has_filter = _restrict_calls()
    if settings["reports"]:
        kept = {
            "network": has_namespaces or has_filter,
            "files": is_restricted,
            "sockets": has_filter,
            "shared memory": has_namespaces or has_filter,
            "disk": has_quota,
        }
        sys.stdout.write(json.dumps([name for name, holds in kept.items() if not holds]))
        return 0
    return _run(source)


if __name__ == "__main__":
    sys.exit(main())
