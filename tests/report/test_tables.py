"""Tables in Markdown and on a terminal."""

from depthlm.report.tables import DASH, Cell, Table, markdown, number_text, plain, signed_text


def test_markdown_characters_are_escaped():
    table = Table(["", "a|b"], [[Cell("x | y*\n<z>"), Cell("1", bold=True)], [Cell("[link] `c`"), Cell("2")]])
    lines = markdown(table).splitlines()
    assert "a\\|b" in lines[0]
    assert lines[1].endswith("-: |")
    assert lines[2].startswith("| x \\| y\\* \\<z> ")
    assert "**1**" in lines[2]
    assert "\\[link\\] \\`c\\`" in lines[3]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert plain("hyper_connections _x_") == "hyper_connections \\_x\\_"


def test_numbers_have_their_decimals_and_sign_or_a_dash():
    nan, inf = float("nan"), float("inf")
    for value, text in {1234.5: "1,234.50", -0.001: "0.00", None: DASH, nan: DASH, inf: DASH}.items():
        assert number_text(value, 2) == text
    for value, text in {0.123: "+0.12", -0.123: "-0.12", 0.001: "0.00", -0.001: "0.00", nan: DASH, None: DASH}.items():
        assert signed_text(value, 2) == text
