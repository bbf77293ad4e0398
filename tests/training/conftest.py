"""Fixtures for the tests of training."""

import pytest

from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed


@pytest.fixture
def fp16_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow fp16 on the CPU, which can compute it slowly, but which the configuration and DeepSpeed refuse."""
    start_distributed(ranks())
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr("depthlm.config.validate.checks._check_device", lambda config: [])
