"""Ranks that do not meet end with words."""

from datetime import timedelta

import pytest

from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import rendezvous
from depthlm.errors import UserError

from ..two_ranks import free_port, rank_variables

SOON = timedelta(seconds=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    port = free_port()
    for name, value in rank_variables(rank, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"2 ranks did not meet at 127\.0\.0\.1:{port} within 1 s .*MASTER_PORT"):
        rendezvous(Ranks(rank, rank, 2, 2, "srun", 1, "127.0.0.1", port), SOON)


def test_a_first_node_without_a_known_name_is_told_at_once() -> None:
    with pytest.raises(UserError, match=r"cannot resolve.*export MASTER_ADDR"):
        rendezvous(Ranks(0, 0, 2, 1, "srun", 2, "no-such-node.invalid", 29500), SOON)
