"""Kill a run with SIGKILL at random moments and start it again until it is done, many times over.

argv: JSON of {"whole": job, "killed": [job, ...], "num_kills": n, "most_saves": m, "seed": s, "report": path}; a job
is [configuration file, override, ...]; a start that is killed while it saves is in one of its first m saves. Every
start is a fork of this process, which has imported everything: a start costs no import.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from dppo_megatron import device
from dppo_megatron.checkpoint_files import find_checkpoints
from dppo_megatron.config.loader import load_config
from dppo_megatron.config.rules import check_config
from dppo_megatron.plan import resolve_layout
from dppo_megatron.train import run_training


def start(job: list[str]) -> int:
    """Start a run in a child process, whose group its own children join; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        log = os.open(str(log_of(job)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        device.set_num_threads()
        loaded = load_config(job[0], job[1:])
        check_config(loaded.config)
        config = loaded.config
        layout = resolve_layout(
            config.cluster,
            megatron=config.policy.megatron_cfg,
            virtual_pp=config.dppo.virtual_pipeline_stages,
        )
        run_training(loaded, layout, command=["test"])
        code = 0
    except (ValueError, RuntimeError, OSError, AssertionError):
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def directory_of(job: list[str]) -> Path:
    """The run's directory."""
    return Path(next(part for part in job if part.startswith("logger.log_dir=")).partition("=")[2])


def log_of(job: list[str]) -> Path:
    """Where the run's output goes."""
    return directory_of(job).with_suffix(".log")


def wait(child: int, *, seconds: float) -> int | None:
    """The child's exit status, None while it runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    return None


def wait_for_save(child: int, checkpoints: Path) -> int | None:
    """Wait until a checkpoint is being written or published; the exit status where the run ends before."""
    before = set(find_checkpoints(checkpoints))
    while True:
        names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
        if any(name.startswith(".") for name in names) or set(find_checkpoints(checkpoints)) != before:
            return None
        if (status := wait(child, seconds=0.002)) is not None:
            return status


def wait_for_saves(child: int, checkpoints: Path, *, count: int) -> int | None:
    """Wait until the last of ``count`` checkpoints is being written or published; as ``wait_for_save``."""
    for _ in range(count - 1):
        before = max(find_checkpoints(checkpoints), default=0)
        while max(find_checkpoints(checkpoints), default=0) == before:
            if (status := wait(child, seconds=0.002)) is not None:
                return status
    return wait_for_save(child, checkpoints)


def kill_until_done(
    job: list[str], *, kills: int, most_saves: int, seconds: float, chance: random.Random
) -> list[dict[str, int]]:
    """Kill a run ``kills`` times if it lives so long, then let it end. seconds: what the whole run takes.

    Returns of each start the newest checkpoint before it, whether it was killed, and whether while saving.
    """
    checkpoints, starts = directory_of(job) / "checkpoints", []
    while True:
        newest = max(find_checkpoints(checkpoints), default=0)
        child, saving, status = start(job), False, None
        if len([one for one in starts if one["killed"]]) < kills:
            saving = chance.random() < 0.5
            if saving:
                status = wait_for_saves(child, checkpoints, count=chance.randint(1, most_saves))
            else:
                status = wait(child, seconds=chance.uniform(0, seconds))
            if saving and status is None:
                status = wait(child, seconds=chance.uniform(0, 0.15))
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        else:
            status = os.waitpid(child, 0)[1]
        end_group(child)
        starts.append({"newest": newest, "killed": int(status is None), "saving": int(saving)})
        if status is not None:
            assert status == 0, f"a start failed: {log_of(job).read_text()[-3000:]}"
            return starts


def end_group(child: int) -> None:
    """End the helpers that a killed run leaves: its orphans write on, as they would in life, for a moment."""
    time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    """Run once without a kill, then with kills in every job in turn until there were enough."""
    order = json.loads(sys.argv[1])
    begin = time.monotonic()
    status = os.waitpid(start(order["whole"]), 0)[1]
    assert status == 0, log_of(order["whole"]).read_text()[-3000:]
    seconds, chance, report, kills = time.monotonic() - begin, random.Random(order["seed"]), [], 0
    for number, job in enumerate(order["killed"]):
        left = -(-(order["num_kills"] - kills) // (len(order["killed"]) - number))
        starts = kill_until_done(job, kills=left, most_saves=order["most_saves"], seconds=seconds, chance=chance)
        kills += sum(one["killed"] for one in starts)
        report.append(starts)
    Path(order["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
