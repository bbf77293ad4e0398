"""Ranks that do not meet end with an error that says what to check."""

from datetime import timedelta

import pytest
import torch

from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import process_groups, rendezvous, set_timeout
from depthlm.errors import UserError

from ..ranks import free_port, rank_variables

SOON = timedelta(seconds=1)


def test_ranks_that_do_not_arrive_time_out(monkeypatch):
    port = free_port()
    for name, value in rank_variables(0, port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("depthlm.distributed.process_group.ARRIVAL", SOON)
    with pytest.raises(UserError, match=rf"2 ranks did not meet at 127\.0\.0\.1:{port} within 1 s .*MASTER_PORT"):
        rendezvous(Ranks(0, 0, 2, 2, "srun", 1, "127.0.0.1", port))


def test_an_address_that_cannot_be_resolved_is_reported_at_once():
    with pytest.raises(UserError, match=r"cannot resolve.*export MASTER_ADDR"):
        rendezvous(Ranks(0, 0, 2, 1, "srun", 2, "no-such-node.invalid", 29500))


def timeout_of_a_group() -> timedelta:
    earlier = process_groups()
    group = torch.distributed.new_group([0, 1], timeout=SOON)
    set_timeout(process_groups() - earlier, timedelta(hours=5))
    found = group._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.destroy_process_group(group)
    return found


def test_a_group_gets_a_timeout_after_it_was_made(two_ranks):
    assert two_ranks(timeout_of_a_group) == [timedelta(hours=5)] * 2
