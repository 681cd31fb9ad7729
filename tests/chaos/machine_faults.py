"""Faults of the machine: processes that die or stop, disks that are full or read-only, damage."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.answers import Damage
from tests.chaos.fault import Injected, NotInjectedError
from tests.chaos.kinds import Kind
from tests.chaos.live_run import LiveRun, Service, holds
from tests.chaos.witness import ROLL_BACK
from vcpo.api import load_run
from vcpo.records.journal import EVENTS_FILE, METRICS_FILE
from vcpo.service.lifecycle import CANNOT_START, DRAINED

Inject = Callable[[LiveRun, random.Random], Awaitable[Injected]]

_POINT_S = 300.0
"""Time in which a process must come to a kill point."""
_START_S = 300.0
_CHECKPOINTS = "checkpoints"
_LOG = "redo-log"
_LOST_CHANGES = r"LogDamaged: .*?(\d+) later ones, which were committed, are lost"
_KILLED = "its host sees that it was killed"
DISK_BYTES: Final = 256 << 20
_ROOM_BYTES = 4096
"""What a full disk has left; a page of its file system."""
_ALL = slice(None)
_DAY_S = 86_400.0
_READ_S = 30.0
"""Time in which a process reads its clock."""


async def kill_worker(run: LiveRun, draw: random.Random) -> Injected:
    """A worker dies at any moment."""
    return await _kill(draw.choice(await _serving_workers(run)))


async def kill_learner(run: LiveRun, draw: random.Random) -> Injected:
    """The learner dies at any moment of its work."""
    learner = await _serving_learner(run)
    await asyncio.sleep(draw.uniform(0.0, 2.0))
    return await _kill(learner)


async def kill_learner_at_start(run: LiveRun, draw: random.Random) -> Injected:
    """The learner dies, and the next one dies while it starts."""
    learner = await _serving_learner(run)
    point, number = draw.choice(["start", "resume"]), len(run.lives)
    _order(run.folder / "orders" / f"learner-{number:03d}", point)
    learner.send(signal.SIGKILL)
    if not await holds(lambda: len(run.lives) > number, _START_S):
        raise NotInjectedError("no other learner started")
    return await _died_at(run.lives[number], point)


def at_point(points: list[str], *, of_learner: bool) -> Inject:
    """A process dies at one of some kill points."""

    async def inject(run: LiveRun, draw: random.Random) -> Injected:
        if of_learner:
            service = await _serving_learner(run)
        else:
            service = draw.choice(await _serving_workers(run))
        point = draw.choice(points)
        _order(service.order, point)
        return await _died_at(service, point)

    return inject


async def terminate_learner(run: LiveRun, _: random.Random) -> Injected:
    """Somebody stops the learner in order; it saves and ends."""
    learner = await _serving_learner(run)
    learner.send(signal.SIGTERM)
    status = await learner.ended(_START_S)
    sign = "it ends with a status of its own, of a drained run"
    return Injected(what=f"{learner.name} terminated", sign=sign, is_shown=status == DRAINED)


async def roll_back(run: LiveRun, _: random.Random) -> Injected:
    """The run goes back to its last good checkpoint, as after a collapse."""
    learner, since = await _serving_learner(run), run.mark()
    _order(learner.order, ROLL_BACK)
    if not await run.told(since, r"RolledBack: |NotRolledBack: ") or run.is_told(
        since, "NotRolled"
    ):
        learner.order.unlink(missing_ok=True)
        raise NotInjectedError("no checkpoint is old enough")
    return Injected(what="rolled back", sign="the event RolledBack")


async def stop_worker(run: LiveRun, draw: random.Random) -> Injected:
    """A worker stands still for a while; longer than its leases live, or not."""
    return await _stop(draw.choice(await _serving_workers(run)), draw.uniform(1.0, 14.0))


async def stop_learner(run: LiveRun, draw: random.Random) -> Injected:
    """The learner stands still for a while."""
    return await _stop(await _serving_learner(run), draw.uniform(0.5, 6.0))


async def fill_disk(run: LiveRun, draw: random.Random) -> Injected:
    """The disk of the run is full for a while; a kernel says so."""
    _require_own_disk(run)
    await _serving_learner(run)
    await _saved(run)
    since, filler = run.mark(), run.run_dir / "filler"
    try:
        _fill(filler)
        is_shown = await run.told(since, r"DiskFull: ")
        await asyncio.sleep(draw.uniform(0.0, 3.0))
    finally:
        filler.unlink(missing_ok=True)
    return Injected(what="disk full", sign="the event DiskFull", is_shown=is_shown)


async def make_checkpoints_read_only(run: LiveRun, _: random.Random) -> Injected:
    """The folder of the checkpoints cannot be written for a while."""
    _require_own_disk(run)
    await _serving_learner(run)
    folder = run.run_dir / _CHECKPOINTS
    await _saved(run)
    since = run.mark()
    with _mounted_read_only(folder):
        is_shown = await run.told(since, r"DiskFull: .*Read-only file system")
    return Injected(what="checkpoints read-only", sign="the event DiskFull", is_shown=is_shown)


async def start_on_read_only_disk(run: LiveRun, _: random.Random) -> Injected:
    """The learner dies, and the next one finds a disk that it cannot write."""
    _require_own_disk(run)
    learner = await _serving_learner(run)
    since, number = run.mark(), len(run.lives)
    with run.without_learner():
        learner.send(signal.SIGKILL)
        await learner.ended(_START_S)
        _mount("-o", "remount,ro", str(run.run_dir))
    try:
        if not await holds(lambda: len(run.lives) > number, _START_S):
            raise NotInjectedError("no other learner started")
        status = await run.lives[number].ended(_START_S)
        is_shown = status == CANNOT_START and run.is_told(since, "Read-only file system")
    finally:
        with run.without_learner():
            await run.learner.ended(_START_S)
            _mount("-o", "remount,rw", str(run.run_dir))
    sign = f"it ends with status {CANNOT_START} and says why"
    return Injected(what="started on a read-only disk", sign=sign, is_shown=is_shown)


async def damage_log(run: LiveRun, draw: random.Random) -> Injected:
    """The disk changes a byte of a change in the redo log while no learner runs."""

    async def damage() -> str:
        after = await asyncio.to_thread(_position_of_newest_checkpoint, run)
        return f"change {_damage_change(run.run_dir / _LOG, draw, after)} damaged"

    return await _damage_of_log(run, Kind.LOG_DAMAGED, damage)


async def _damage_of_log(
    run: LiveRun, kind: Kind, damage: Callable[[], Awaitable[str]]
) -> Injected:
    """Damage the log between two learners, and note what the second one says that it lost.

    What it says too little of, the recorder finds.
    """
    learner = await _serving_learner(run)
    since, number = run.mark(), len(run.lives)
    with run.without_learner():
        learner.send(signal.SIGKILL)
        await learner.ended(_START_S)
        what, damaged_unix_s = await damage(), time.time()
    if not await holds(lambda: len(run.lives) > number and run.has_resumed(number), _START_S):
        raise NotInjectedError("no other learner resumed")
    told = run.found(since, _LOST_CHANGES)
    run.damages.append(
        Damage(kind=kind, at_unix_s=damaged_unix_s, told_changes=sum(map(int, told)))
    )
    sign = "the event LogDamaged, with the number of changes that are lost"
    lost = f"; told: {', '.join(told)} changes lost" if told else ""
    return Injected(what=what + lost, sign=sign, is_shown=bool(told))


async def damage_checkpoint(run: LiveRun, draw: random.Random) -> Injected:
    """The disk changes bytes of the newest of several checkpoints while no learner runs."""
    learner = await _serving_learner(run)
    if len(_checkpoints(run)) < 2:
        raise NotInjectedError("no two checkpoints yet")
    since = run.mark()
    with run.without_learner():
        learner.send(signal.SIGKILL)
        await learner.ended(_START_S)
        newest = _checkpoints(run)[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        _damage(draw.choice(files), draw)
    is_shown = await run.told(since, r"CheckpointDamaged: ")
    sign = "the event CheckpointDamaged"
    return Injected(what=f"{newest.name} damaged", sign=sign, is_shown=is_shown)


async def tear_journal(run: LiveRun, draw: random.Random) -> Injected:
    """A writer that died has left half a line in the journal."""
    path = run.run_dir / draw.choice([METRICS_FILE, EVENTS_FILE])
    if not path.exists():
        raise NotInjectedError(f"no {path.name} yet")
    with path.open("ab") as file:
        file.write(b'{"type":"step","st')
    return Injected(what=f"half a line in {path.name}")


async def kill_weight_server(run: LiveRun, _: random.Random) -> Injected:
    """The process that sends weights dies; another one follows."""
    since, server = run.mark(), await _weight_server(run)
    os.kill(server, signal.SIGKILL)
    sign = "the learner says that it was killed, and that another one starts"
    is_shown = await run.told(since, r"the server of weights was killed by SIGKILL.*another one")
    return Injected(what=f"process {server} killed", sign=sign, is_shown=is_shown)


def set_clock(low_days: float, high_days: float, *, jumps: int = 0) -> Inject:
    """The learner's wall clock is set to another day, or jumps and is right again.

    Workers read none.
    """

    async def inject(run: LiveRun, draw: random.Random) -> Injected:
        service = await _serving_learner(run)
        before = service.clock.num_readings
        for _ in range(jumps):
            service.clock.set_to(_DAY_S * draw.uniform(low_days, high_days))
            await asyncio.sleep(draw.uniform(0.0, 0.5))
        days = 0.0 if jumps else draw.uniform(low_days, high_days)
        service.clock.set_to(_DAY_S * days)
        was_read = await holds(
            lambda: service.clock.num_readings > before or not service.is_alive, _READ_S
        )
        if not was_read or not service.is_alive:
            raise NotInjectedError(f"{service.name} does not read its clock")
        how = f"{jumps} jumps" if jumps else f"{days:.1f} days off"
        return Injected(what=f"clock of {service.name}: {how}")

    return inject


async def _weight_server(run: LiveRun) -> int:
    """Process id of the one that sends the learner's weights.

    Raises:
        NotInjectedError: if there is none in time.
    """
    learner = await _serving_learner(run)

    def found() -> list[int]:
        children = Path(f"/proc/{learner.process.pid}").glob("task/*/children")
        return [
            int(child)
            for path in children
            for child in path.read_text().split()
            if b"vcpo_learner.weight_server" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    with contextlib.suppress(OSError):
        if await holds(lambda: bool(found()), _READ_S):
            return found()[0]
    raise NotInjectedError("no process sends weights")


async def _kill(service: Service) -> Injected:
    service.send(signal.SIGKILL)
    status = await service.ended(_START_S)
    shown = status == -signal.SIGKILL
    return Injected(what=f"{service.name} killed", sign=_KILLED, is_shown=shown)


async def _died_at(service: Service, point: str) -> Injected:
    """Wait until a process has died at its kill point.

    Raises:
        NotInjectedError: if it did not come there, or ended in another way.
    """
    status = await service.ended(_POINT_S)
    if service.order.exists():
        service.order.unlink()
        raise NotInjectedError(f"{service.name} did not come to the point {point}")
    shown = status == -signal.SIGKILL
    return Injected(what=f"{service.name} killed at {point}", sign=_KILLED, is_shown=shown)


async def _stop(service: Service, duration_s: float) -> Injected:
    service.send(signal.SIGSTOP)
    await asyncio.sleep(duration_s)
    service.send(signal.SIGCONT)
    return Injected(what=f"{service.name} stopped for {duration_s:.1f} s")


async def _serving_learner(run: LiveRun) -> Service:
    """The learner, when it serves.

    Raises:
        NotInjectedError: if it does not in time.
    """
    serves = await holds(
        lambda: bool(run.lives) and run.learner.is_alive and run.learner.ready is not None, _START_S
    )
    if not serves:
        raise NotInjectedError("no learner serves")
    return run.learner


async def _serving_workers(run: LiveRun) -> list[Service]:
    """The workers that serve; as `_serving_learner`."""

    def serving() -> list[Service]:
        return [each for each in run.living_workers if each.ready is not None]

    if not await holds(lambda: bool(serving()), _START_S):
        raise NotInjectedError("no worker serves")
    return serving()


async def _saved(run: LiveRun) -> None:
    """Wait for a checkpoint: a learner whose disk failed before tells of the first failure only.

    Raises:
        NotInjectedError: if none is written in time.
    """
    if not await run.told(run.mark(), r"CheckpointSaved: "):
        raise NotInjectedError("no checkpoint is written")


def _order(path: Path, point: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(point)
    partial.replace(path)


def _checkpoints(run: LiveRun) -> list[Path]:
    return sorted((run.run_dir / _CHECKPOINTS).glob("step-*"))


def _damage(path: Path, draw: random.Random, part: slice = _ALL) -> None:
    data = bytearray(path.read_bytes())
    data[draw.choice(range(len(data))[part])] ^= 0x5A
    path.write_bytes(data)


def _position_of_newest_checkpoint(run: LiveRun) -> int:
    """The last change that the next learner has from its checkpoint.

    The log itself may not know the newest one: its learner died between the checkpoint and the log.
    """
    from vcpo_learner.checkpoints.folder import CheckpointFolder  # loads torch

    folder = CheckpointFolder(run.run_dir / _CHECKPOINTS, load_run(run.folder / "run.yaml"))
    newest, _ = folder.load_newest()
    return 0 if newest is None else newest.ledger[0].log_position


def _damage_change(folder: Path, draw: random.Random, after: int) -> int:
    """Change a byte of a change after a position; return the change's position.

    Raises:
        NotInjectedError: if there is none.
    """
    found = []
    for path in folder.glob("*.log"):
        data, offset, position = path.read_bytes(), 0, int(path.name[:16])
        while offset + 16 <= len(data):
            size = int.from_bytes(data[offset : offset + 4], "little")
            if position > after:
                found.append((position, path, slice(offset + 16, offset + 16 + size)))
            offset, position = offset + 16 + size, position + 1
    if not found:
        raise NotInjectedError("no change since the newest checkpoint")
    position, path, part = draw.choice(found)
    _damage(path, draw, part)
    return position


def _fill(path: Path) -> None:
    """Write until the disk has no room."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(_ROOM_BYTES * 16))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def _require_own_disk(run: LiveRun) -> None:
    """Check that the run has a disk of its own, which a fault may fill.

    Raises:
        NotInjectedError: if it shares one with the machine.
    """
    if shutil.disk_usage(run.run_dir).total > DISK_BYTES:
        raise NotInjectedError("this system lets nobody mount a disk of his own")


@contextlib.contextmanager
def _mounted_read_only(folder: Path) -> Iterator[None]:
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*options: str) -> None:
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise NotInjectedError(f"mount {' '.join(options)}: {error.stderr.strip()}") from error


INJECTORS: Final[Mapping[Kind, Inject]] = {
    Kind.WORKER_KILLED: kill_worker,
    Kind.WORKER_STOPPED: stop_worker,
    Kind.WORKER_KILLED_AT_SWAP: at_point(["swap", "swapped"], of_learner=False),
    Kind.WORKER_KILLED_AT_SUBMIT: at_point(["submit", "submitted"], of_learner=False),
    Kind.LEARNER_KILLED: kill_learner,
    Kind.LEARNER_STOPPED: stop_learner,
    Kind.LEARNER_KILLED_AT_START: kill_learner_at_start,
    Kind.LEARNER_KILLED_AT_STEP: at_point(["step"], of_learner=True),
    Kind.LEARNER_KILLED_AT_COMMIT: at_point(["commit", "committed"], of_learner=True),
    Kind.LEARNER_KILLED_AT_SAVE: at_point(["save", "saved"], of_learner=True),
    Kind.LEARNER_KILLED_AT_PUBLISH: at_point(["publish", "published"], of_learner=True),
    Kind.LEARNER_TERMINATED: terminate_learner,
    Kind.ROLLED_BACK: roll_back,
    Kind.DISK_FULL: fill_disk,
    Kind.DISK_READ_ONLY: make_checkpoints_read_only,
    Kind.DISK_READ_ONLY_AT_START: start_on_read_only_disk,
    Kind.LOG_DAMAGED: damage_log,
    Kind.CHECKPOINT_DAMAGED: damage_checkpoint,
    Kind.JOURNAL_TORN: tear_journal,
    Kind.SERVER_KILLED: kill_weight_server,
    Kind.CLOCK_BACK: set_clock(-400.0, -0.01),
    Kind.CLOCK_FORTH: set_clock(0.01, 400.0),
    Kind.CLOCK_JUMPING: set_clock(-400.0, 400.0, jumps=12),
}
