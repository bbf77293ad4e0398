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


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r"""(?:src="|<link(?! rel="canonical")[^>]* href="|@import |url\(["']?)(?:https?:)?//""")
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 30
    assert not [file for file in files if loads.search(file.read_text())]


def test_the_reference_is_complete(site: Path) -> None:
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
    assert not [page for page in site.rglob("*.html") if "<!-- api:" in page.read_text()]


def test_formulas_and_the_notebook_are_rendered(site: Path) -> None:
    mechanisms = (site / "mechanisms/index.html").read_text()
    page = re.sub("^```.*?^```", "", (REPOSITORY / "docs/mechanisms.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"\$\$(.+?)\$\$", page)
    # a narrow screen breaks the line of a formula where the page has \qquad
    parts = len(blocks) + "".join(blocks).count(r"\qquad")
    assert len(blocks) > 10
    assert mechanisms.count('display="block"') == parts
    assert mechanisms.count('display="inline"') == page.count("$") // 2 - 2 * len(blocks) > 100
    assert "$" not in re.sub("<[^>]+>", "", mechanisms.partition("<article")[2].partition("</article>")[0])
    notebook = site / "notebooks/across_depth/index.html"
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', notebook.read_text())
    assert len(pictures) == 4
    assert all((notebook.parent / picture).is_file() for picture in pictures)


def test_links_out_of_docs_lead_to_pages_of_the_site(site: Path) -> None:
    link = re.search(r'href="([^"]+connection\.py/)"', (site / "architecture/index.html").read_text())
    assert link is not None
    page = site / "architecture" / link[1] / "index.html"
    assert "class Connection" in re.sub("<[^>]+>", "", page.read_text())


def test_the_first_page_is_the_readme_and_fits_into_80_lines(site: Path) -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 80
    page = (site / "index.html").read_text()
    headings = re.findall(r'<h2 id="([\w-]+)"', page)
    assert headings[:4] == ["try", "add-your-own", "reproduce-a-table", "scale-out"]
    assert 'src="images/inspect_depth_mixing.png"' in page


def test_a_link_to_a_page_has_its_title(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if "source" not in page.relative_to(site).parts]
    assert not [page for page in pages if re.search(r"<a [^>]*>[\w./-]+\.md</a>", page.read_text())]
    page = (site / "mechanisms/index.html").read_text()
    assert '<a href="../evaluation/#the-depth-mixing-matrix">The depth mixing matrix</a>' in page
    assert '<a href="../kernels/">Kernels</a>' in page


def test_blocks_of_code_inside_of_lists_stay_inside(site: Path) -> None:
    page = (site / "contributing/index.html").read_text()
    (numbered,) = re.findall(r"<ol>.*?</ol>", page, re.DOTALL)
    assert numbered.count("<pre") == 3


def test_narrow_screens_break_lines_between_words(site: Path) -> None:
    page = (site / "data/index.html").read_text()
    assert '<code><span class="flag">--verify</span></code>' in page
    # also in blocks, and in cells of tables, of which the long ones are as wide as text
    assert '<span class="flag">--local-dir</span>' in page
    assert '<td class="long">none: the running Python</td>' in page
    assert "depthlm.<wbr>ops.<wbr>dca" in (site / "reference/operators/index.html").read_text()


def test_pictures_lead_to_their_files_and_primes_are_no_exponents(site: Path) -> None:
    assert '<a href="../images/inspect_blocks.png"><img' in (site / "evaluation/index.html").read_text()
    page = (site / "mechanisms/index.html").read_text()
    assert "<mi>k</mi><mi>&#x02032;</mi>" in page
    assert "<mi>&#x02032;</mi></msup>" not in page
