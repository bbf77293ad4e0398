"""Run the compiled code of the Triton kernels on the CPU, and compare it with float64 references. See README.md.

python -m tests.ptx_machine [--only WORDS] [--seeds N] [--target 80|90]
"""

import argparse
import sys
import time
from collections import Counter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with these words in their name")
    parser.add_argument("--seeds", type=int, default=1, help="random orders of warps for small cases (default: 1)")
    parser.add_argument("--target", type=int, default=80, choices=(80, 86, 89, 90), help="compute capability")
    parser.add_argument("--huge", action="store_true", help="instead, tensors of more than 2^31 numbers (`huge.py`)")
    parser.add_argument("--list", action="store_true", help="name the cases, and run nothing")
    asked = parser.parse_args()
    from .launcher import Launcher

    launcher = Launcher(asked.target)
    import torch

    from depthlm.ops import backend

    from .cases import all_cases

    torch.set_num_threads(1)
    # the dispatch of the project accepts CPU tensors
    backend.missing = lambda device: None
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    if asked.huge:
        return check_huge(launcher, asked.only)
    for case in all_cases():
        if not all(word in case.name for word in asked.only.split()):
            continue
        if asked.list:
            print(case.name)
            continue
        outcomes[check(case, launcher, asked.seeds)] += 1
    print(f"{outcomes.total()} cases: {dict(outcomes)}; {time.perf_counter() - started:.0f} s")
    print(
        f"{launcher.launches.total()} launches of {len(launcher.launches)} kernels in {len(launcher.programs)} versions"
    )
    for name, count in sorted(launcher.all_notes.items()):
        print(f"note: {name} ({count} times)")
    for name, count in sorted(launcher.all_faults.items()):
        print(f"fault: {name} ({count} times)")
    return int(any(name != "agrees" for name in outcomes))


def check(case, launcher, seeds: int) -> str:
    """Run a case in each order, print a line, and return the outcome."""
    import torch

    from .cases import TOLERANCES

    begun, expected, first, problems = time.perf_counter(), case.results("torch"), None, []
    before = launcher.launches.total()
    orders = [("together", 0)]
    if case.small and seeds:
        orders += [("first", 0), ("last", 0), *(("random", seed) for seed in range(seeds))]
    worst = 0.0
    for order, seed in orders:
        launcher.begin(order, seed)
        try:
            found = case.results("triton")
        except Exception as error:
            problems.append(f"{order}: {type(error).__name__}: {error}")
            break
        faults, examples = launcher.reports.faults, launcher.reports.examples
        problems += [f"{order}: {name} ({count} times): {examples[name]}" for name, count in faults.items()]
        differences = compare(found, expected)
        worst = max([worst, *differences.values()], key=lambda x: float("inf") if x != x else x)
        limit = TOLERANCES[case.dtype] * case.factor
        problems += [f"{order}: {name} differs by {x:.2g}" for name, x in differences.items() if not x <= limit]
        if first is None:
            first = found
        else:
            changed = [name for name, x in found.items() if not torch.equal(x.nan_to_num(7), first[name].nan_to_num(7))]
            problems += [f"{order} {seed}: other numbers than together: {', '.join(changed)}"] if changed else []
    seconds, count = time.perf_counter() - begun, launcher.launches.total() - before
    line = f"{case.name:62} {len(orders)} orders {count:4} launches {seconds:6.1f} s  largest difference {worst:.1e}  "
    print(line + ("agrees" if not problems else "FAULT"), flush=True)
    show(list(dict.fromkeys(problems)))
    return "agrees" if not problems else "faulty"


def show(problems: list[str], most: int = 12) -> None:
    for problem in problems[:most]:
        print("    " + problem, flush=True)
    if len(problems) > most:
        print(f"    and {len(problems) - most} more", flush=True)


def check_huge(launcher, words: str) -> int:
    import torch

    from .huge import all_huge

    torch.utils.deterministic.fill_uninitialized_memory, launcher.edges, faulty = False, True, 0
    for name, call in all_huge():
        if all(word in name for word in words.split()):
            begun = time.perf_counter()
            launcher.begin("together", 0)
            found, expected = call()
            differences = compare(*({str(k): x for k, x in enumerate(xs)} for xs in (found, expected)))
            wrong = [f"result {k} differs by {x:.2g}" for k, x in differences.items() if not x <= 0.04]
            problems = wrong + [f"{fault}: {launcher.reports.examples[fault]}" for fault in launcher.reports.faults]
            print(f"{name:20} {time.perf_counter() - begun:6.1f} s  {'FAULT' if problems else 'agrees'}", flush=True)
            show(problems)
            faulty += bool(problems)
    return int(faulty > 0)


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
