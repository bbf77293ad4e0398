"""The site, built strictly: mkdocs fails for a broken link or anchor, and for a page outside of the navigation."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from depthlm.config.keys import keys
from depthlm.locations import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_pages_load_nothing_from_other_hosts(site):
    loads = re.compile(r"""(?:src="|<link(?! rel="canonical")[^>]* href="|@import |url\(["']?)(?:https?:)?//""")
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 30
    assert not [file for file in files if loads.search(file.read_text())]


def test_the_reference_is_complete(site):
    configuration = (site / "reference/configuration/index.html").read_text()
    assert not [name for name in keys() if f"<code>{name}</code>" not in configuration]
    assert "<code>model.connection.own_embedding</code>" in configuration
    assert "<code>attention_residuals_recency</code>" in configuration
    python = (site / "reference/python/index.html").read_text()
    for name in ("compose", "build_model", "train", "load"):
        assert f'id="depthlm.{name}"' in python
    # a line `name: meaning` of a docstring is an item of a list
    assert re.search(r"<li>\s*(<p>)?<code>config_dir</code>: an additional folder", python)
    operators = (site / "reference/operators/index.html").read_text()
    assert re.search(r"</ul>\s*<p>Raises, if Triton kernels run", operators)
    # links to files have the repository's address, which is not given here
    assert not [page for page in site.rglob("*.html") if re.search("<!-- api:|=.file:", page.read_text())]
