"""Run the compiled code of the Triton kernels on the CPU, and compare it with float64 references. See README.md.

python -m tests.ptx_machine [--only WORDS]
"""

import argparse
import sys
import time
from collections import Counter

from .launcher import Launcher


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with these words in their name")
    words = parser.parse_args().only.split()
    launcher = Launcher()
    import torch

    from depthlm.ops import backend

    from .cases import all_cases
    from .huge import all_huge

    torch.set_num_threads(1)
    # the dispatch of the project accepts CPU tensors
    backend.missing = lambda device: None
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    for case in all_cases():
        if all(word in case.name for word in words):
            outcomes[check(case, launcher)] += 1
    torch.utils.deterministic.fill_uninitialized_memory, launcher.edges = False, True
    for name, call in all_huge():
        if all(word in name for word in words):
            outcomes[check_huge(name, call, launcher)] += 1
    print(f"{outcomes.total()} cases: {dict(outcomes)}; {time.perf_counter() - started:.0f} s")
    print(
        f"{launcher.launches.total()} launches of {len(launcher.launches)} kernels in {len(launcher.programs)} versions"
    )
    for name, count in sorted(launcher.all_notes.items()):
        print(f"note: {name} ({count} times)")
    for name, count in sorted(launcher.all_faults.items()):
        print(f"fault: {name} ({count} times)")
    return int(any(name != "agrees" for name in outcomes))


def check(case, launcher) -> str:
    """Run a case, print a line, and return the outcome."""
    from .cases import TOLERANCES

    begun, expected, before = time.perf_counter(), case.results("torch"), launcher.launches.total()
    launcher.begin()
    try:
        differences = compare(case.results("triton"), expected)
    except Exception as error:
        return report(case.name, begun, float("nan"), [f"{type(error).__name__}: {error}"])
    limit = TOLERANCES[case.dtype] * case.factor
    problems = [f"{name} differs by {x:.2g}" for name, x in differences.items() if not x <= limit]
    text = f"{case.name:62} {launcher.launches.total() - before:4} launches"
    worst = max(differences.values(), key=lambda x: float("inf") if x != x else x)
    return report(text, begun, worst, problems + launcher.reports.described())


def check_huge(name: str, call, launcher) -> str:
    begun = time.perf_counter()
    launcher.begin()
    differences = compare(*({str(k): x for k, x in enumerate(xs)} for xs in call()))
    problems = [f"result {k} differs by {x:.2g}" for k, x in differences.items() if not x <= 0.04]
    problems += launcher.reports.described()
    return report(f"huge {name:57}", begun, max(differences.values()), problems)


def report(text: str, begun: float, worst: float, problems: list[str]) -> str:
    outcome, problems = "FAULT" if problems else "agrees", list(dict.fromkeys(problems))
    seconds = time.perf_counter() - begun
    print(f"{text} {seconds:6.1f} s  largest difference {worst:.1e}  {outcome}", flush=True)
    for problem in problems[:12]:
        print("    " + problem, flush=True)
    return outcome


def compare(found, expected) -> dict[str, float]:
    """Return for each tensor the largest difference, relative to its largest number, or a tenth of that of all."""
    largest = max((float(y.abs().max()) for y in expected.values() if y.numel()), default=1.0)
    result = {name: float("nan") for name in expected if name not in found}
    for name, y in expected.items():
        if name in found and y.numel():
            x = found[name].double()
            scale = max(float(y.abs().max()), 0.1 * largest, 1e-30)
            result[name] = float((x - y).abs().max()) / scale if x.shape == y.shape else float("nan")
    return result


if __name__ == "__main__":
    sys.exit(main())
