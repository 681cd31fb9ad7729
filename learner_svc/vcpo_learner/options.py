"""The command line of every rank of the learner."""

from dataclasses import dataclass
from pathlib import Path

from vcpo.service.lifecycle import ServiceOptions, split_address
from vcpo.wire.access.roles import RoleKeys
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import VersionFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ServiceOptions):
    """The command line, see `python -m vcpo_learner --help`."""

    run_dir: Path
    weights_listen: str | None
    """host:port of the process that sends weights; None: the host of `listen`, any free port."""
    weights_host: str
    """Host at which workers reach that process; empty: that at which they reach the learner."""
    resume: bool
    linger_s: float

    def weight_server(
        self, folder: VersionFolder, *, keys: RoleKeys | None, number: int = 0
    ) -> WeightServer | None:
        """Return the server of a rank's folder; None if all workers see the folder.

        number: of the rank on its machine.
        """
        if folder.served_root is None:
            return None
        return WeightServer(
            folder.served_root,
            self._weights_address(number),
            removed=Path(folder.url) if folder.is_temporary else None,
            host=self.weights_host,
            tls=self.tls,
            plain_text=self.plain_text,
            keys=keys,
        )

    def _weights_address(self, number: int) -> str:
        """Return host:port where a rank's server listens; port 0: any free one."""
        if self.weights_listen is None:
            return f"{split_address(self.listen)[0]}:0"
        host, port = split_address(self.weights_listen)
        return f"{host}:{port + number if port else 0}"
