"""Small files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it. OSError for a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write plain values as indented JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())
