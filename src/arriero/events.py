"""The one log of what happened to a run: one JSON object per line."""

import json
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
START_OVER = "start over"


def events_since(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events after the last one of a kind; all of them without one. A kill can leave half a line."""
    found: list[dict[str, Any]] = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == kind:
            found.clear()
        elif isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


class EventLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")
