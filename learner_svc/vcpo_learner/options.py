"""The command line of every rank of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vcpo.service.lifecycle import split_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, see `python -m vcpo_learner --help`."""

    run_file: Path
    run_dir: Path
    listen: str
    metrics_listen: str
    weights_listen: str | None
    """host:port of the process that sends weights; None: the host of `listen`, any free port."""
    weights_host: str
    """Host at which workers reach that process; empty: that at which they reach the learner."""
    resume: bool
    drain_s: float
    linger_s: float
    tls: Path | None
    """Folder of the certificates; None if there is none."""
    plain_text: bool
    """Whether plain text may leave this machine."""
    health_listen: str | None
    ready_file: Path | None
    exit_with_parent: bool

    def weights_address(self, number: int) -> str:
        """Return host:port where a server of weights listens; port 0: any free one.

        number: of the server on its machine; that of a rank's process is the rank's there.

        Raises:
            ValueError: if an address has another form.
        """
        if self.weights_listen is None:
            return f"{split_address(self.listen)[0]}:0"
        host, port = split_address(self.weights_listen)
        return f"{host}:{port + number if port else 0}"
