"""The coordinate check measures what a parametrization is for: changes that do not grow with width and depth."""

import pytest

from benchmarks import coordinate_check


@pytest.mark.slow
def test_only_the_changes_of_the_standard_parametrization_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinate_check, "AXES", {"width": (1, 4), "depth": (1, 4)})
    results = coordinate_check.measure(["vanilla"], steps=3)
    growth = {
        (axis, name): points[-1]["outputs"] / points[0]["outputs"]
        for axis, by_name in results["changes"]["vanilla"].items()
        for name, points in by_name.items()
    }
    assert growth["width", "standard"] > 3 > 1.5 > growth["width", "mup"] > 0.67
    assert growth["depth", "standard"] > 2 > 1.5 > growth["depth", "completep"] > 0.67
    coordinate_check.draw(results, "vanilla", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
