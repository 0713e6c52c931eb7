"""Writing a RunConfig as TOML. Libraries that write TOML keep no comments, and comments carry the origins."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from arriero.config.schema import RunConfig


def to_toml(config: RunConfig, comment: Callable[[str], str | None] = lambda _: None) -> str:
    """The whole config; `comment` may add a remark to a key. Keys without a value are left out."""
    blocks = []
    for section, table in config.model_dump(mode="json", exclude_none=True).items():
        lines = [f"[{section}]"]
        for name, value in table.items():
            remark = comment(f"{section}.{name}")
            line = f"{name} = {toml_value(value)}"
            lines.append(f"{line:<40} # {remark}" if remark else line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
