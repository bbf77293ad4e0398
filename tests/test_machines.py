"""The Dockerfiles name what exists."""

import re
import tomllib

import pytest

from depthlm.locations import REPOSITORY

DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_dockerfile_copies_files_and_installs_extras_that_exist(file):
    text = file.read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert [name for name in line.split() if not (REPOSITORY / name).exists()] == []
    extras = re.findall(r'--editable "\.\[(.+)\]"', text)[0].split(",")
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= known.keys() - {"dev"}
    # the build context has neither runs nor packages of this machine
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs", "data/tokens"} <= set(ignored)
