"""The tests of the repository that use a GPU where there is one.

python benchmarks/first_hour/device_tests.py tests/ops tests/model/test_kernels.py --output tests.json
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from interleaved import write_json

from depthlm.locations import REPOSITORY


def outcomes(report: Path) -> dict[str, Any]:
    """Return the numbers of tests by outcome, and the message of each failure, from pytest's report in JUnit's XML."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    problems = [(case, problem) for case in cases for problem in case if problem.tag in ("failure", "error")]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failures = [
        {
            "test": f"{case.get('classname')}.{case.get('name')}",
            "message": " ".join((problem.get("message") or "").split())[:300],
        }
        for case, problem in problems
    ]
    failed = len({failure["test"] for failure in failures})
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--processes", type=int, default=0, help="processes that run tests (default: this one)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # verbose, so that the log has the outcome of every test that finishes before the limit
        options = ["-v", "--tb=short", f"--numprocesses={arguments.processes}", f"--junitxml={report}"]
        done = subprocess.run([sys.executable, "-m", "pytest", *options, *arguments.tests], cwd=REPOSITORY)
        if not report.exists():
            return done.returncode or 1
        results = outcomes(report)
    write_json(arguments.output, results)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
