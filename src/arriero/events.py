"""The one log of what happened to a run: one JSON object per line."""

import json
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


class EventLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")
