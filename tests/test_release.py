"""What a release needs: one version in all of its files, with the same date, and a valid citation."""

import re

import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import depthlm
from depthlm.locations import REPOSITORY


def test_the_version_and_its_date_are_the_same_everywhere():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert versions[0] == (depthlm.__version__, str(citation["date-released"]))
    assert citation["version"] == depthlm.__version__
    assert versions == sorted(versions, key=lambda one: [int(part) for part in one[0].split(".")], reverse=True)

    assert {"cff-version", "title", "message", "authors"} <= citation.keys()
    assert citation["license"] in (REPOSITORY / "pyproject.toml").read_text()


def test_the_wheel_has_classifiers_and_the_addresses_of_the_papers():
    # raises ValueError for a classifier that PyPI does not know
    metadata = ProjectMetadata(str(REPOSITORY), PluginManager()).core
    assert "Programming Language :: Python :: 3.11" in metadata.classifiers
    assert len(metadata.urls) > 5
