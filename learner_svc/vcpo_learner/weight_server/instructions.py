"""What the owner of weights tells its server's process: which files to send, and when to stop.

```
{"number": 3, "held": [["a1b2", 7, null, 0], ["a1b2", 7, 6, 4]], "new": [4]}      + descriptor of 4
{"stop": 2.0}
```

One line of JSON for each, over a socket. The descriptor of a file travels with the line that names
the file first. Every line names all files, so a process that starts anew needs one line.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count

from vcpo_learner.shared_file import SharedFile
from vcpo_learner.weight_server.held_files import HeldFile

_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253
"""Most descriptors that Linux sends with one message; a store keeps fewer files."""


class Instructions:
    """The owner's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._files: dict[SharedFile, int] = {}
        """Those that the process knows, with their numbers."""
        self._file_numbers = count()
        self._numbers = count()

    def hold(self, held: Sequence[HeldFile]) -> int:
        """Tell the process to send these files and no others; return the instruction's number.

        Raises:
            OSError: if the process has ended, or reads nothing.
        """
        known = self._files
        files = {each.file for each in held}
        new = {file: next(self._file_numbers) for file in files if file not in known}
        self._files = {file: (known | new)[file] for file in files}
        entries = [
            (
                each.incarnation,
                each.policy_version,
                each.base_policy_version,
                self._files[each.file],
            )
            for each in held
        ]
        number = next(self._numbers)
        line = {"number": number, "held": entries, "new": list(new.values())}
        self._send(line, [file.descriptor for file in new])
        return number

    def stop(self, grace_s: float) -> None:
        """Tell the process to end when its running fetches have, or after `grace_s` seconds.

        Raises:
            OSError: as `hold`.
        """
        self._send({"stop": grace_s}, [])

    def _send(self, line: dict[str, object], descriptors: Sequence[int]) -> None:
        data = json.dumps(line).encode() + b"\n"
        if socket.send_fds(self._connection, [data], descriptors) < len(data):
            raise BlockingIOError("the server of weights reads no instructions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction as the process reads it."""

    number: int = 0
    held: tuple[HeldFile, ...] = ()
    stop_s: float | None = None
    """Set: end within this many seconds; there is nothing else to read then."""


async def read_instructions(connection: socket.socket) -> AsyncIterator[Instruction]:
    """Yield instructions until the owner closes its end, or ends."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    connection.setblocking(False)
    loop.add_reader(connection, readable.set)
    files: dict[int, SharedFile] = {}
    unfinished, descriptors = b"", list[int]()
    try:
        while True:
            await readable.wait()
            readable.clear()
            try:
                data, received, *_ = socket.recv_fds(connection, _READ_BYTES, _MAX_DESCRIPTORS)
            except BlockingIOError:  # what the event announced was read before
                continue
            except ConnectionError:
                return
            if not data:
                return
            descriptors += received
            *lines, unfinished = (unfinished + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "stop" in told:
                    yield Instruction(stop_s=told["stop"])
                    continue
                for number in told["new"]:
                    files[number] = SharedFile(descriptors.pop(0), is_writable=False)
                    files[number].close_descriptor()
                held = tuple(_held_file(entry, files) for entry in told["held"])
                files = {entry[3]: files[entry[3]] for entry in told["held"]}
                yield Instruction(number=told["number"], held=held)
    finally:
        loop.remove_reader(connection)


def _held_file(entry: Sequence[object], files: dict[int, SharedFile]) -> HeldFile:
    incarnation, policy_version, base_policy_version, number = entry
    assert isinstance(incarnation, str)
    assert isinstance(policy_version, int)
    assert isinstance(base_policy_version, int | None)
    assert isinstance(number, int)
    return HeldFile(
        incarnation=incarnation,
        policy_version=policy_version,
        base_policy_version=base_policy_version,
        file=files[number],
    )
