"""Which architecture's tiles a GPU takes."""

import pytest

from depthlm.ops import tiles


@pytest.mark.parametrize(
    ("capability", "architecture"), [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((7, 5), "sm_80"), ((12, 0), "sm_100")]
)
def test_a_gpu_takes_the_tiles_of_the_newest_architecture_that_is_not_newer(capability, architecture, monkeypatch):
    monkeypatch.setattr(tiles, "TILES", {"sm_100": {}, "sm_80": {}, "sm_90": {}})
    monkeypatch.setattr(tiles, "gpu_capability", lambda: capability)
    assert tiles.architecture.__wrapped__() == architecture
