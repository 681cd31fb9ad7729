"""The process in which a model's Python runs; `runner` starts this file.

It gives up its rights in this order, and then runs the program from its standard input:

namespaces  its own: no network device, no memory shared with others, and a folder in memory of
            limited size (Linux, as root or with user namespaces)
files       Landlock: it reads the interpreter's own files, and writes to its folder (Linux 5.13)
processes   Landlock: no TCP, no signal to others (Linux 6.7, 6.12); and no new process or thread
root        the child of a root process becomes nobody; nobody else keeps a capability
limits      CPU time, memory, size of files, open files; it cannot raise them again
parent      it is killed when its parent dies
calls       seccomp: no sockets, not even local ones, no shared memory, no signal to others, not
            by the owner of a file either, nor a change of their limits or priority, no mounts or
            namespaces, no escape from the parent's death, no change of the modes, owners or times
            of files (Linux, x86-64 and 64-bit ARM)

It skips a step that the system refuses, and reports the skipped ones if the parent asks. The parent
may start it in bubblewrap (`bubblewrap.py`), which makes the namespaces, and adds a root folder and
process ids of its own. This protects against mistakes and mischief of programs. Where programs may
be hostile, run the workers in a sandbox for pods (gVisor, Kata).
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
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

# By machine: its constant in linux/audit.h.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# The tables below hold the numbers of system calls on (x86-64, 64-bit ARM); None: it has no such
# call. Calls since Linux 5.1 have the same number on both.
_REFUSED_CALLS = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "process_mrelease": (448, 448),
}
_REFUSED_ON_SHARED_FILES = {
    # Landlock governs none of them, and `truncate` only from Linux 6.2 on: with them a program
    # could damage any file of its user, and the interpreter's.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
}
_ALLOWED_ON_ITSELF = {
    # Their first argument is a process; 0 is the caller, or its group, which has no other process.
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}
_REFUSED_ORDERS = {
    # By their second argument: each would let a file's signal reach another process.
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
}
_PRCTL = {"x86_64": 157, "aarch64": 167}
_X32_CALLS = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
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


def _restrict_files(folder: str, readable: list[str]) -> bool:
    """Restrict file access by Landlock; return whether the system supports it."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]
    asked = _Ruleset(rights, _TCP_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(asked), ctypes.c_size_t(size), 0)
    for path in readable:
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


def _drop_privileges(nobody: int, *, keep_reading: bool) -> None:
    """Become nobody, and drop all capabilities, those of a user namespace too.

    keep_reading: root keeps its right to read, because Landlock limits what can be read. An
    interpreter in root's home directory could not read its modules otherwise.
    """
    was_root = os.geteuid() == 0
    if was_root:
        os.setgroups([])
        os.setgid(nobody)
        if sys.platform == "linux":
            _libc.prctl(_KEEP_CAPABILITIES, int(keep_reading), 0, 0, 0)
        os.setuid(nobody)
    if sys.platform != "linux":
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    right = _READ_SEARCH if was_root and keep_reading else 0
    if _libc.capset(header, (ctypes.c_uint32 * 6)(right, right)) != 0:  # the parent lacked it
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


def _restrict_calls(*, has_own_root: bool) -> bool:
    """Install the seccomp filter, as the last step; return whether the system supports it.

    has_own_root: no file of another process is within reach, and none of the interpreter's can be
    written, so the program may change the modes and times of its own.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    shared = {} if has_own_root else _REFUSED_ON_SHARED_FILES
    instructions = _filter_instructions(machine, os.getpid(), {**_REFUSED_CALLS, **shared})
    array = (_Instruction * len(instructions))(*(_Instruction(*one) for one in instructions))
    program = _Filter(len(instructions), array)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0)


def _filter_instructions(
    machine: str, own_pid: int, refused: dict[str, tuple[int, int | None]]
) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions: (code, jump if true, jump if false, value) each."""
    at = list(_ARCHITECTURES).index(machine)
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
    for numbers in refused.values():
        if (number := numbers[at]) is not None:
            checks += [(_JUMP_EQUAL, 0, 1, number), refuse]
    for numbers in _ALLOWED_ON_ITSELF.values():
        checks += [(_JUMP_EQUAL, 0, 5, numbers[at]), first_argument]
        checks += [(_JUMP_EQUAL, 1, 0, own_pid), (_JUMP_EQUAL, 0, 1, 0), allow, refuse]
    # A check that loads an argument ends in a return: the call's number is no longer loaded.
    for numbers, orders in _REFUSED_ORDERS.values():
        tests = [one for order in orders for one in ((_JUMP_EQUAL, 0, 1, order), refuse)]
        checks += [(_JUMP_EQUAL, 0, 2 + len(tests), numbers[at]), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
        checks += [*tests, allow]
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


def confine(readable: list[str], *, nobody: int, cpu_s: int, memory_bytes: int) -> None:
    """Give up the rights of this process, a fork of one thread that writes to open pipes only.

    As `main`, but in no namespaces and without a folder.
    """
    is_restricted = sys.platform == "linux" and _restrict_files("", readable)
    _drop_privileges(nobody, keep_reading=is_restricted)
    _limit(cpu_s, memory_bytes, 0)
    if sys.platform == "linux":
        _libc.prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        _restrict_calls(has_own_root=False)


def main() -> int:
    """Give up rights, then run the program; or print the unsupported protections as JSON."""
    settings = json.loads(sys.argv.pop())
    source = sys.stdin.buffer.read().decode()
    own_root = settings["own_root"]
    has_namespaces = has_quota = is_restricted = has_filter = False
    if sys.platform == "linux":
        nobody = settings["nobody"]
        owner = (nobody, nobody) if os.geteuid() == 0 else (os.getuid(), os.getgid())
        has_namespaces = own_root or _leave_namespaces()
        has_quota = has_namespaces and _limit_disk(
            settings["folder"], owner[0], owner[1], settings["disk_bytes"]
        )
        is_restricted = _restrict_files(settings["folder"], settings["readable"])
    _drop_privileges(settings["nobody"], keep_reading=is_restricted)
    _limit(settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"])
    if sys.platform == "linux":
        _libc.prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        has_filter = _restrict_calls(has_own_root=own_root)
    _tell_worker(settings["worker_socket"])
    if settings["reports"]:
        kept = {
            "network": has_namespaces or has_filter,
            "files": own_root or (is_restricted and has_filter),
            "sockets": has_filter,
            "processes": own_root or has_filter,
            "shared memory": has_namespaces or has_filter,
            "disk": own_root or has_quota,
        }
        missing = [name for name, holds in kept.items() if not holds]
        sys.stdout.write(json.dumps({"missing": missing, "has_namespaces": has_namespaces}))
        return 0
    return _run(source)


if __name__ == "__main__":
    sys.exit(main())
