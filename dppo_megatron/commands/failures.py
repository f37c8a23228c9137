"""How a command ends that could not do its work: one message and an exit code."""

import os
import sys
import time

from dppo_megatron.terminal_text import printable

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def complain(error: Exception | str, code: int) -> int:
    """Write the message of a failure; returns the exit code."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # What every rank finds wrong, rank 0 says; the launcher ends this process meanwhile.
        time.sleep(10)
    where = f" (rank {rank})" if rank != "0" else ""
    sys.stderr.write(f"dppo: error{where}: {printable(str(error))}\n")
    return code
