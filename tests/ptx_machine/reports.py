"""What a run of kernels has found, and how often."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Reports:
    """What was found, and how often. Faults: each kind once for each place of a kernel, with an example; notes: once
    for each kernel. all_faults and all_notes: of several cases.
    """

    all_faults: Counter = field(default_factory=Counter)
    all_notes: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    doubtful: Counter = field(default_factory=Counter)
    kernel: str = ""

    def fault(self, kind: str, place, detail: str = "", count: int = 1) -> None:
        fault = f"{kind} in {self.kernel} at {place_text(place)}"
        self.examples.setdefault(fault, detail)
        for counter in (self.faults, self.all_faults):
            counter[fault] += count

    def described(self) -> list[str]:
        return [f"{fault} ({count} times): {self.examples[fault]}" for fault, count in self.faults.items()]

    def doubt(self, kind: str, place, detail: str, count: int) -> None:
        """A race that is no fault if nothing depends on what was read; `settle` decides."""
        fault = f"{kind} in {self.kernel} at {place_text(place)}"
        self.examples.setdefault(fault, detail)
        self.doubtful[fault] += count

    def settle(self, harmless: bool) -> None:
        for fault, count in self.doubtful.items():
            if harmless:
                self.all_notes[f"race in which nothing depends on what was read, in {self.kernel}"] += count
            for counter in () if harmless else (self.faults, self.all_faults):
                counter[fault] += count
        self.doubtful.clear()

    def note(self, kind: str, place, detail: str = "", count: int = 1) -> None:
        self.all_notes[f"{kind} in {self.kernel}"] += count


def place_text(place) -> str:
    return f"{place.source} (PTX line {place.line}: {' '.join(place.text.split())})"
