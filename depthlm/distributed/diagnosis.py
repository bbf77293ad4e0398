"""Who is to blame when a run of several ranks stands still: pure judgement of their signs of life."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

NAMED = 8


@dataclass(frozen=True)
class Heartbeat:
    """One sign of life of a rank.

    count: a new one each time; step, turn, phase: the main thread's last mark, turn being the phases before it in the
    step; still: seconds since that mark; where: the line of code it is at; limited: whether it may not be still for
    ever; heard: it knows that the run, or the first rank, ends; left: it is through, and need
    not be judged.
    """

    count: int = 0
    step: int = 0
    turn: int = 0
    phase: str = "starting"
    still: float = 0.0
    where: str = ""
    limited: bool = True
    heard: bool = False
    left: bool = False

    def packed(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str | bytes) -> "Heartbeat":
        """The other way round."""
        return Heartbeat(**json.loads(text))

    def place(self) -> str:
        """The last mark in words."""
        return f"step {self.step}, {self.phase}"


@dataclass(frozen=True)
class FailureReport:
    """Why all end: the ranks to blame, what is told, and the exit code.

    raised: it is an exception, so that the others may raise the same by themselves within moments.
    """

    ranks: tuple[int, ...]
    text: str
    code: int = 1
    raised: bool = False

    def packed(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str | bytes) -> "FailureReport":
        """The other way round."""
        fields = json.loads(text)
        return FailureReport(**fields | {"ranks": tuple(fields["ranks"])})


class AwakeClock:
    """Seconds in which this process ran: the hours for which it was stopped itself are nobody else's silence."""

    def __init__(self, now: float, longest: float) -> None:
        self.before, self.longest, self.seconds = now, longest, 0.0

    def tick(self, now: float) -> float:
        """The seconds so far; a gap between two ticks counts as `longest` at most."""
        self.seconds += min(max(0.0, now - self.before), self.longest)
        self.before = now
        return self.seconds


class Listener:
    """When each rank was last heard, by the listener's own clock."""

    def __init__(self, ranks: Iterable[int], names: Mapping[int, str], now: float) -> None:
        self.names, self.last, self.since = names, {rank: Heartbeat() for rank in ranks}, dict.fromkeys(ranks, now)

    def hear(self, rank: int, sign: Heartbeat, now: float) -> None:
        """A sign as it stands in the store, new or not."""
        if sign.count != self.last[rank].count:
            self.since[rank] = now
        self.last[rank] = sign

    def silent(self, limit: float, now: float) -> FailureReport | None:
        """The ranks that have given no sign for so many seconds."""
        blamed = [rank for rank, sign in self.last.items() if not sign.left and now - self.since[rank] > limit]
        if not blamed:
            return None
        place = self.last[blamed[0]].place()
        verb = "has" if len(blamed) == 1 else "have"
        silence = f"{verb} given no sign of life for {limit:g} s, the last in {place}"
        return FailureReport(tuple(blamed), f"{listed(blamed, self.names)} {silence}")


def stalled(signs: Mapping[int, Heartbeat], names: Mapping[int, str], limit: float) -> FailureReport | None:
    """The ranks that hold up a run in which nobody has made a mark for so many seconds; None if one has.

    To blame are those that are behind. Where all are at the same place, their lines of code are told.
    """
    here = {rank: sign for rank, sign in signs.items() if not sign.left}
    if not here or any(sign.still <= limit or not sign.limited for sign in here.values()):
        return None
    still = f"no progress for {min(sign.still for sign in here.values()):.0f} s"
    first = min((sign.step, sign.turn) for sign in here.values())
    blamed = [rank for rank, sign in here.items() if (sign.step, sign.turn) == first]
    sign = here[blamed[0]]
    if len(blamed) < len(here):
        verb = "has" if len(blamed) == 1 else "have"
        text = f"{listed(blamed, names)} {verb} made {still}, in {sign.place()}{_at(sign)}; the others wait"
        return FailureReport(tuple(blamed), text)
    lines: dict[str, list[int]] = {}
    for rank, other in here.items():
        lines.setdefault(other.where, []).append(rank)
    fewest_first = sorted(lines.items(), key=lambda item: len(item[1]))
    told = "; ".join(f"{listed(ranks, names)} at {where or 'an unknown line'}" for where, ranks in fewest_first)
    return FailureReport(
        tuple(blamed), f"all ranks have made {still} and wait at the same place, {sign.place()}: {told}"
    )


def listed(ranks: Iterable[int], names: Mapping[int, str]) -> str:
    """`rank 3 (host gpu-7, pid 1234)`, or several such, the first eight by name."""
    ranks = list(ranks)
    told = [f"rank {rank} ({names[rank]})" for rank in ranks[:NAMED]]
    if len(ranks) > NAMED:
        told.append(f"{len(ranks) - NAMED} more")
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


def _at(sign: Heartbeat) -> str:
    return f", at {sign.where}" if sign.where else ""
