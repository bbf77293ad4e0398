"""The choice among candidates, and the source that benchmarks/tune.py writes."""

from pathlib import Path

from benchmarks import tune
from depthlm.ops import tiles

PRESENT = {"dca": {"WARPS": 4, "PROGRAMS": 1}, "mhc": {"POSITIONS": 16}}


def line(kernels, change, constants, **result):
    return {"kernels": kernels, "change": change, "constants": constants, **result}


def test_each_constant_is_halved_and_doubled():
    changes = [x.change for x in tune.candidates_of("dca", PRESENT["dca"])]
    assert changes == ["", "WARPS 4 -> 2", "WARPS 4 -> 8", "PROGRAMS 1 -> 2"]


def test_the_fastest_candidate_replaces_the_present_constants_if_it_is_clearly_faster():
    lines = [
        line("dca", "", PRESENT["dca"], seconds=1.0),
        line("dca", "WARPS 4 -> 8", {"WARPS": 8, "PROGRAMS": 1}, seconds=0.8),
        line("dca", "PROGRAMS 1 -> 2", {"WARPS": 4, "PROGRAMS": 2}, error="results differ by 1"),
        line("mhc", "", PRESENT["mhc"], seconds=1.0),
        line("mhc", "POSITIONS 16 -> 32", {"POSITIONS": 32}, seconds=0.98),
    ]
    assert tune.improve(PRESENT, lines) == {"dca": {"WARPS": 8, "PROGRAMS": 1}, "mhc": {"POSITIONS": 16}}
    assert tune.improve(PRESENT, [line | {"error": "no time was left"} for line in lines[3:4]]) == PRESENT


def test_tiles_are_written_into_the_source():
    source = Path(tiles.__file__).read_text()
    assert tune.replace_table(source, tiles.TILES) == source
    namespace: dict = {}
    exec(tune.replace_table(source, tiles.TILES | {"sm_100": PRESENT}), namespace)
    assert namespace["TILES"] == tiles.TILES | {"sm_100": PRESENT}


def test_every_group_but_the_head_is_tuned():
    assert {*tiles.TILES["sm_90"]} == {*tune.OPERATORS, "cross_entropy"}
