#!/usr/bin/env python3
"""Slurm's commands as far as the batch scripts use them, on plain processes: the name it is called by says which.

sbatch [--nodes=N] [--ntasks-per-node=N] SCRIPT ARGS: runs the script at once with a job's variables.
srun: one process a task, each with its task's variables, output by node, USR1 and TERM passed on; the exit code is
the tasks' highest. scontrol: show hostnames, requeue (noted in $FAKE_SLURM/requeued).
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def read_options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Leading --name=value options, and the rest."""
    options = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        options[name] = value
    return options, arguments


def sbatch(arguments: list[str]) -> int:
    """Run a script as a job of its #SBATCH options, those of the command line winning."""
    ours, (script, *rest) = read_options(arguments)
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE)) | ours
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as copy:
        copy.write(text)  # as Slurm's spool directory
    environment = os.environ | {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    os.execve("/bin/bash", ["bash", copy.name, *rest], environment)


def srun(arguments: list[str]) -> int:
    """Run the tasks of a step."""
    options, command = read_options(arguments)
    nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    running = []
    for rank in range(nodes * tasks):
        environment = os.environ | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % tasks),
            "SLURM_NODEID": str(rank // tasks),
            "SLURMD_NODENAME": f"node{rank // tasks + 1}",
        }
        with Path(options["output"].replace("%N", environment["SLURMD_NODENAME"])).open("a") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def pass_on(number: int, _: object) -> None:
        for task in running:
            task.send_signal(number)

    for one in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(one, pass_on)
    first_end = None
    while None in (codes := [task.poll() for task in running]):
        if first_end is None and any(code is not None for code in codes):
            first_end = time.monotonic()
        if first_end is not None and time.monotonic() - first_end > float(options["wait"]):
            for task in running:
                task.kill()
        time.sleep(0.05)
    return max(128 - code if code < 0 else code for code in codes if code is not None)


def scontrol(arguments: list[str]) -> int:
    """``show hostnames LIST`` and ``requeue ID``."""
    match arguments:
        case ["show", "hostnames", names]:
            last = int(re.fullmatch(r"node\[1-(\d+)\]", names)[1])  # type: ignore[index]
            # The first must resolve, since the ranks meet there.
            print("\n".join(["localhost", *(f"node{number}" for number in range(2, last + 1))]))
        case ["requeue", job]:
            with (Path(os.environ["FAKE_SLURM"]) / "requeued").open("a") as file:
                file.write(job + "\n")
        case _:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
