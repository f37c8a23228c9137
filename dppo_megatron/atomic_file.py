"""Files that are either the old one or the new one, whole, whenever the machine stops."""

import os
from pathlib import Path


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file's content at once, UTF-8; a crash leaves the old file or the new one.

    Raises: OSError where the directory is missing or not writable; the old file is then untouched.
    """
    # In the same directory: a rename across file systems would not be atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
