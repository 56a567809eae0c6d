"""The charts: the page's colours and font, the same each time, and positions that the slider can rely on."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from unmerge.report import charts

CURVE = [(0.0, 1.0, 0.98), (1.0, 0.5, 0.97), (2.0, 0.0, 0.9)]


@pytest.fixture(scope="module")
def layers(finished_run):
    return json.loads((finished_run / "diagnosis.json").read_text())["layers"]


@pytest.fixture(scope="module")
def drawn(layers):
    return {
        "alpha": charts.alpha_chart(CURVE, 1.0, 0.01),
        "profile": charts.profile_chart(layers, 0.05),
        "spectra": charts.spectra_chart(charts.shown_spectra(layers)),
        "angles": charts.angle_chart(layers),
    }


@pytest.mark.parametrize("name", ["alpha", "profile", "spectra", "angles"])
@pytest.mark.parametrize("shape", ["wide", "narrow"])
def test_a_drawing_is_plain_svg_in_the_pages_colours(drawn, name, shape):
    body = getattr(drawn[name], shape).body
    ElementTree.fromstring(f"<svg>{body}</svg>")
    assert "<text" in body
    assert "var(--" in body
    assert not re.search(r"#0[1-8]0[1-8]0[1-8]|metadata|font-family|DejaVu|xlink|\d\.\d{3}", body)
    colors = set(re.findall(r"(?:fill|stroke): (#\w+)", body))
    assert not colors, "a colour that does not follow light and dark"


def test_the_same_values_draw_the_same(drawn, layers):
    assert charts.alpha_chart(CURVE, 1.0, 0.01) == drawn["alpha"]
    assert charts.profile_chart(layers, 0.05) == drawn["profile"]


def test_corners_place_the_measured_points(drawn):
    for shape in (drawn["alpha"].wide, drawn["alpha"].narrow):
        x0, x1, y0, y1 = shape.corners
        assert 0 < x0 < x1 < shape.width
        assert 0 < y1 < y0 < shape.height
        places = {(float(x), float(y)) for x, y in re.findall(r'<use [^>]*?x="([\d.]+)" y="([\d.]+)"', shape.body)}
        for alpha, forget, _ in CURVE:
            x, y = x0 + alpha / 2 * (x1 - x0), y0 + forget * (y1 - y0)
            assert min(abs(x - own) + abs(y - other) for own, other in places) < 0.1


def test_a_single_point_and_no_retain_are_drawn():
    chart = charts.alpha_chart([(1.5, 0.2, None)], None, None)
    assert chart.wide.body.count("<use") >= 1


def test_odd_layer_names_are_text(layers):
    name = r"block.$\frac{1$ <b> & 日本"
    body = charts.spectra_chart({name: next(iter(layers.values()))}).wide.body
    element = ElementTree.fromstring(f"<svg>{body}</svg>")
    assert any(name in (text or "") for text in element.itertext())


def test_the_edited_layers_are_shown_first_and_last(layers):
    layer = next(iter(layers.values()))
    many = {str(place): layer | {"edited": place >= 10} for place in range(30)}
    assert list(charts.shown_spectra(many)) == ["10", "16", "23", "29"]
    assert list(charts.shown_spectra({"a": layer | {"edited": False}})) == ["a"]


def test_layers_without_directions_and_many_layers(layers):
    layer = next(iter(layers.values())) | {"overlaps": [], "cosines": [], "gains": []}
    empty = {"only": layer}
    assert charts.angle_chart(empty).wide.body
    assert charts.profile_chart(empty, None).narrow.body
    many = {str(place): layer | {"cosines": [0.1, 0.9]} for place in range(200)}
    assert len(charts.angle_chart(many).wide.body) < 50_000
