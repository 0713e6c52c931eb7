"""Notice from outside that no rank of a run reports any more, when their own watchdog cannot act."""

import json
import time
from pathlib import Path

from arriero.events import HEARTBEAT

# the ranks' own watchdog acts first and needs time to write its report
_PATIENCE = 2.0
_MARGIN_S = 60.0


class Heartbeat:
    """Follows RUN/heartbeat.json, which rank 0 writes while it runs."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._began = run_dir / HEARTBEAT, time.time()
        self._acted = False

    def silence(self) -> float | None:
        """Return the seconds since the last heartbeat if they are too many, once."""
        try:
            beat = json.loads(self._path.read_bytes())
            last, limit = float(beat["time"]), float(beat["limit_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        silence = time.time() - max(last, self._began)
        if self._acted or last < self._began or limit <= 0 or silence < _PATIENCE * limit + _MARGIN_S:
            return None
        self._acted = True
        return silence
