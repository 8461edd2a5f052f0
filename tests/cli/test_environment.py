"""Which job a process belongs to, from the names that torchrun and SLURM set."""

import pytest

from interlace.errors import InputError
from interlace.ranks.launched import adopt_job

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step of a job of 4
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_no_job_means_local_processes(environment):
    """One task per node, a batch script and a plain shell start their own ranks."""
    before = dict(environment)
    assert adopt_job(environment) is None
    assert environment == before


def test_torchrun_is_taken_as_it_is():
    """RANK and WORLD_SIZE win over SLURM, and nothing is changed."""
    environment = {**STEP, "RANK": "1", "WORLD_SIZE": "2"}
    before = dict(environment)
    assert adopt_job(environment) == 2
    assert environment == before


def test_plain_srun_is_translated():
    """SLURM's names become those that torch reads."""
    environment = {**STEP, **MEETING}
    assert adopt_job(environment) == 4
    assert environment["RANK"] == "3"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (STEP, "without MASTER_ADDR and MASTER_PORT"),
        ({**STEP, "MASTER_ADDR": "a"}, "without MASTER_PORT"),
        ({"RANK": "0"}, "RANK is set in the environment without its partner"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set in the environment without its partner"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE = '-2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 is outside WORLD_SIZE = 2"),
    ],
)
def test_half_a_job_is_refused(environment, message):
    """Waiting for ranks that never come is worse than an error."""
    with pytest.raises(InputError) as caught:
        adopt_job(dict(environment))
    assert message in caught.value.message
    assert caught.value.hint
