"""The tiles, warps and programs of the Triton kernels, by architecture. `benchmarks/tune.py` measures and writes them.

Those of sm_90 were chosen by measurements on an H200 and by a model of it. Other GPUs take the newest architecture in
the table that is not newer than theirs, or the oldest one.
"""

from functools import cache

from depthlm.ops.backend import gpu_capability

TILES: dict[str, dict[str, dict[str, int]]] = {
    "sm_90": {
        "attention_residuals": {"WIDTH": 64, "WARPS": 4, "MEDIUM_WARPS": 2, "PROGRAMS": 512},
        "attention_residuals_few": {"POSITIONS": 4, "PROGRAMS": 256},
        "cross_entropy": {"COLUMNS": 4096, "WARPS": 8},
        "dca": {"DOT_ROWS": 64, "WARPS": 4, "PROGRAMS": 64, "ALL_PROGRAMS": 256},
        "denseformer": {"TILE_VALUES": 512},
        "depth_attention": {"TILE": 2048, "WARPS": 4},
        "hyper_connections": {"POSITIONS": 8},
        "mhc": {"PROJECTED_POSITIONS": 32, "POSITIONS": 16},
        "moda": {"TILE": 16, "STAGES": 3},
        "reads": {"ROWS": 32, "WIDTH": 64, "WARPS": 8},
        "streams": {"WARPS": 4},
    },
}


@cache
def architecture() -> str:
    """Return the architecture of TILES whose constants this machine's GPU takes."""
    major, minor = gpu_capability()
    known = sorted(TILES, key=_number)
    return max((x for x in known if _number(x) <= 10 * major + minor), key=_number, default=known[0])


def tiles_of(kernels: str) -> dict[str, int]:
    """Return the constants of a group of kernels on this machine."""
    return TILES[architecture()][kernels]


def _number(name: str) -> int:
    return int(name.removeprefix("sm_"))
