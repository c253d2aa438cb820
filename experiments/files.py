"""Files that are whole or not there."""

import json
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Writes a value, and makes the folders above it; who reads meanwhile sees what was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    draft.replace(path)
