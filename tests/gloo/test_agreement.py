"""Proves that ranks which are about to run different things all stop, naming who and what."""

import os

import pytest
from processes import gloo_group, run_ranks

from interlace.errors import PeerError
from interlace.ranks.agree import check_agreement, environment_fields

pytestmark = pytest.mark.gloo


def compare(*fields_of_rank: dict[str, str]) -> list[object] | None:
    """A child: the error of this rank, or nothing if all agree."""
    with gloo_group():
        try:
            check_agreement(fields_of_rank[int(os.environ["RANK"])])
        except PeerError as error:
            return [error.message, list(error.ranks)]
    return None


def compare_in_group() -> list[object] | None:
    """A child of three: ranks 1 and 2 agree about one thing, ranks 0 and 2 do not."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    with gloo_group():
        same, other = dist.new_group([1, 2]), dist.new_group([0, 2])
        try:
            if rank in (1, 2):
                check_agreement({"data": "x"}, group=same)
            if rank in (0, 2):
                check_agreement({"data": str(rank)}, group=other)
        except PeerError as error:
            return [error.message, list(error.ranks)]
    return None


def errors(*fields_of_rank: dict[str, str]) -> list[list]:
    results = run_ranks("test_agreement:compare", len(fields_of_rank), args=fields_of_rank)
    return [result.value for result in results]


def test_equal_fields_pass() -> None:
    fields = {"configuration": "x" * 100_000, "plan": "", "graph": "\u00e9"}
    assert errors(fields, fields) == [None, None]


def test_the_first_field_that_differs_and_the_minority_are_named_on_all_ranks() -> None:
    usual = {"configuration": "a", "plan": "F1 B1", "graph": "g"}
    odd = usual | {"plan": "B1 F1", "graph": "h"}
    of_ranks = errors(usual, odd, usual)
    for rank, (message, ranks) in enumerate(of_ranks):
        shown = "B1 F1" if rank == 1 else "F1 B1"
        assert message.startswith(
            f"rank 1 disagrees with the other 2 about 'plan'; rank {rank} has '{shown}' (sha256 "
        )
        assert ranks == [1]
    assert of_ranks[0][0].replace("rank 0", "rank 2") == of_ranks[2][0]


def test_a_tie_blames_the_higher_ranks_and_a_missing_field_is_found() -> None:
    (message, ranks), _ = errors({"plan": "p", "data": "d"}, {"plan": "p"})
    assert "rank 1 disagrees with the other 1 about 'the compared fields'" in message
    assert "'plan, data'" in message
    assert ranks == [1]


def test_groups_are_compared_apart_and_ranks_are_global() -> None:
    results = run_ranks("test_agreement:compare_in_group", 3)
    assert results[1].value is None
    for result in (results[0], results[2]):
        message, ranks = result.value
        assert message.startswith("rank 2 disagrees with the other 1 about 'data'")
        assert ranks == [2]


def test_one_process_agrees_with_itself() -> None:
    check_agreement({"plan": "p"})


def test_environment_fields_hold_what_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("TORCH_", "NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    for local in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA"):
        monkeypatch.setenv(local, "of this host")
    fields = environment_fields()
    assert fields["environment"] == "NCCL_ALGO=Ring TORCH_NCCL_BLOCKING_WAIT=1"
    assert set(fields) == {"interlace version", "torch version", "python version", "environment"}
    assert all(fields.values())
