"""The variables that a launcher sets for the ranks of a run."""

import socket

WORLD_SIZE = 2


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_variables(rank: int, port: int, world_size: int = WORLD_SIZE) -> dict[str, str]:
    """Return the variables that a launcher would set for this rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
