"""Claims about ``dppo doctor``."""

import subprocess
import sys
from pathlib import Path

import pytest

from dppo_megatron import doctor
from dppo_megatron.doctor import Verdict

DOCTOR = ["-m", "dppo_megatron", "doctor"]


def test_all_findings_are_one_line_each_and_a_sound_machine_passes(tmp_path: Path) -> None:
    command = [sys.executable, *DOCTOR, "--directory", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = result.stdout.splitlines()
    bad = [line for line in lines if line.startswith("BAD")]
    assert result.returncode == (1 if bad else 0), result.stdout
    assert not [line for line in bad if "disk" not in line], "only the disk may be too small here"
    subjects = {line.split()[1] for line in lines}
    assert subjects == {"versions", "slurm", "disk", "rename", "clock", "devices", "ranks"}
    assert not list(tmp_path.iterdir()), "it left its probes behind"


def test_ranks_that_meet_are_counted(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *DOCTOR]
    result = subprocess.run(
        [sys.executable, *launch, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert "gloo          2 ranks meet" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("environment", "subject", "part"),
    [
        ({"SLURM_JOB_ID": "1"}, "slurm", "SLURM_NTASKS"),
        (
            {
                "SLURM_JOB_ID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_JOB_NODELIST": "a",
            },
            "slurm",
            "MASTER_ADDR and MASTER_PORT",
        ),
    ],
)
def test_a_job_without_its_variables_is_bad_with_a_remedy(
    environment: dict[str, str], subject: str, part: str
) -> None:
    bad = [finding for finding in doctor._slurm(environment) if finding.verdict is Verdict.BAD]
    assert any(part in finding.found and finding.subject == subject and finding.remedy for finding in bad)


def test_a_directory_that_is_missing_is_bad_with_a_remedy(tmp_path: Path) -> None:
    (finding,) = doctor._disk(tmp_path / "none")
    assert finding.verdict is Verdict.BAD
    assert finding.remedy


def test_a_file_system_that_cannot_rename_a_directory_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no such call")

    monkeypatch.setattr(Path, "rename", refuse)
    finding = doctor._rename(tmp_path)
    assert finding.verdict is Verdict.BAD
    assert "no such call" in finding.found
    assert not list(tmp_path.iterdir())
