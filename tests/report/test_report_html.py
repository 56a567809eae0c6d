"""The page as text: what it says, what it leaves out, and that nothing from a run can get out of its place."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from unmerge import report
from unmerge.errors import FileError, UnmergeError
from unmerge.evaluation import Evaluation
from unmerge.report import page as pages
from unmerge.report import view, words
from unmerge.storage.files import write_json

HOSTILE = "</script><script>alert(1)</script> \"quoted\" 'single' <b>&amp; {{ 7 * 7 }} $x_{ ]]> --> 日本 \u2028 é"
VOID = {"meta", "link", "img", "input", "br", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, the text of each, and tags that were not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.words.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(data for tag, data in self.words if tag not in ("script", "style")).split())


@pytest.fixture(scope="module")
def text(finished_run):
    return (finished_run / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def rewritten(path, change):
    value = json.loads(path.read_text())
    write_json(path, change(value) or value)


def test_one_small_file_with_the_sections_in_order(finished_run, text, page):
    assert len(text.encode()) < 1_000_000
    assert not list(finished_run.glob(".*.part"))
    found = [attributes["id"] for attributes in page.all("section")]
    expected = ["verdict", "result", "strength", "layers", "spectra", "angles", "samples", "made", "limits"]
    assert found == expected
    verdict = json.loads((finished_run / "diagnosis.json").read_text())["verdict"]
    for said in (verdict["kind"].capitalize(), verdict["sentence"], f"{verdict['separability']:.3f}", "label=3"):
        assert said in page.text
    assert "certified deletion" in page.text
    assert "linear probe" in page.text


def test_write_says_where_and_takes_another_path(run, tmp_path):
    assert report.write(run) == run / "report.html"
    assert report.write(str(run), tmp_path / "deep" / "other.html") == tmp_path / "deep" / "other.html"
    assert (tmp_path / "deep" / "other.html").read_bytes() == (run / "report.html").read_bytes()


def test_nothing_refers_to_anything_outside(page, text):
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"url\((?!#)|@import|//[a-z]+\.[a-z]", text)
    policy = next(entry["content"] for entry in page.all("meta") if "http-equiv" in entry)
    assert policy.startswith("default-src 'none'")


def test_the_markup_is_whole_and_accessible(page):
    assert not page.wrong
    assert not page.open
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("svg"):
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 20
    assert all(attributes.get("alt") for attributes in page.all("img"))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) == 1
    assert [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    labelled = {attributes["for"] for attributes in page.all("label")}
    assert {attributes["id"] for attributes in page.all("input")} <= labelled
    targets = {link["href"][1:] for link in page.all("a")}
    assert targets <= set(ids)


def test_references_inside_a_chart_stay_inside_it(page):
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    used = {attributes["href"][1:] for attributes in page.all("use")}
    clips = {attributes["clip-path"][5:-1] for _, attributes in page.elements if "clip-path" in attributes}
    assert used | clips <= ids


def test_the_best_cells_are_those_of_the_evaluation(finished_run, text):
    evaluation = Evaluation.from_dict(json.loads((finished_run / "evaluation.json").read_text()))
    best = sum(len(table.best(column)) for table in evaluation.tables.values() for column in table.columns)
    assert text.count('<td class="best">') == best > 0
    assert all(title in text for title in evaluation.tables)


def test_before_and_after_are_those_of_the_evaluation(finished_run):
    rows = json.loads((finished_run / "evaluation.json").read_text())["tables"]["accuracy"]["rows"]
    shown = view.view(report.read(finished_run))["outcome"]
    assert [entry["name"] for entry in shown] == ["forget", "retain", "test"]
    assert shown[0]["before"] == words.percent(rows["un-edited"]["forget"]["value"])
    assert shown[0]["after"] == words.percent(rows["unmerge"]["forget"]["value"])
    assert not view.view(replace(report.read(finished_run), evaluation=None))["outcome"]  # of rows put back: no answer


def test_before_and_after_are_the_runs_own_where_it_measured_them(finished_run):
    parts = report.read(finished_run)
    accuracy = {"before": {"forget": 0.91, "retain": 0.92}, "after": {"forget": 0.01, "retain": 0.9}}
    shown = view.view(replace(parts, run={**parts.run, "accuracy": accuracy}))["outcome"]
    assert [entry["after"] for entry in shown] == ["1.0\u202f%", "90.0\u202f%"]


def test_a_summary_stands_open_and_the_rest_is_folded(finished_run):
    parts = report.read(finished_run)
    tables = {"summary": parts.evaluation["tables"]["accuracy"], **parts.evaluation["tables"]}
    shown = view.view(replace(parts, evaluation={**parts.evaluation, "tables": tables}))
    assert [table["title"] for table in shown["open_tables"]] == ["summary"]
    assert len(shown["folded_tables"]) == len(tables) - 1


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        (["evaluation.json"], "No evaluation was made in this run"),
        (["alpha.json"], "Alpha was fixed in this run"),
        (["evaluation.json", "alpha.json"], "No evaluation was made in this run"),
    ],
)
def test_missing_parts_are_left_out_and_named(run, gone, says):
    for name in gone:
        (run / name).unlink()
    page = Page(report.write(run).read_text(encoding="utf-8"))
    assert says in page.text
    assert not page.wrong
    assert bool(page.all("input")) == ("alpha.json" not in gone)


def test_without_samples_command_or_times(run):
    rewritten(run / "run.json", lambda value: {"model": value["model"], "samples": []})
    page = Page(report.write(run).read_text(encoding="utf-8"))
    assert "kept no sample images" in page.text
    assert not page.all("img")
    assert not page.wrong


def test_samples_that_are_no_images_or_too_many_are_left_out(run, monkeypatch):
    monkeypatch.setattr(view, "IMAGE_BYTES", 500)

    def change(value):
        value["samples"][0]["png"] = '"><script>alert(1)</script>'
        value["samples"][1]["png"] = "aGVsbG8="
        value["samples"][2]["png"] = None

    rewritten(run / "run.json", change)
    page = Page(report.write(run).read_text(encoding="utf-8"))
    assert 0 < len(page.all("img")) < 5
    assert f"{8 - len(page.all('img'))} more left out" in page.text


def test_hostile_words_stay_words(run):
    def in_run(value):
        for key in ("model", "init", "request", "command", "created"):
            value[key] = f"{key} {HOSTILE}"
        value["versions"] = {HOSTILE: HOSTILE}
        value["seconds"] = {HOSTILE: 1.0}
        for sample in value["samples"]:
            sample.update(label=HOSTILE, before=HOSTILE, after="other " + HOSTILE)

    def in_diagnosis(value):
        value["layers"] = {f"{name} {HOSTILE}": layer for name, layer in value["layers"].items()}
        value["verdict"]["kind"] = HOSTILE
        value["verdict"]["sentence"] = HOSTILE
        value["basis"] = HOSTILE

    def in_edit(value):
        value["head"] = HOSTILE
        value["recipe"]["layers"] = [HOSTILE]
        value["provenance"]["choices"] = {"layers": HOSTILE}
        value["provenance"]["notes"]["left_out"] = {HOSTILE: HOSTILE}
        value["weights"] = {HOSTILE: HOSTILE}

    def in_evaluation(value):
        text = json.dumps(value)
        value = json.loads(text.replace('"un-edited"', json.dumps(HOSTILE)))
        value["missing"] = {HOSTILE: HOSTILE}
        value["tables"][HOSTILE] = value["tables"]["accuracy"]
        return value

    rewritten(run / "run.json", in_run)
    rewritten(run / "diagnosis.json", in_diagnosis)
    rewritten(run / "edit" / "edit.json", in_edit)
    rewritten(run / "evaluation.json", in_evaluation)
    page = Page(report.write(run).read_text(encoding="utf-8"))
    assert not page.wrong
    assert [script.get("type") for script in page.all("script")] == ["application/json", None]
    assert not page.all("b") or all(not attributes for attributes in page.all("b"))
    command = "".join(data for tag, data in page.words if tag == "code")
    assert f"command {HOSTILE}" in command
    assert {image["alt"] for image in page.all("img")} == {f"Sample labelled {HOSTILE}"}


def test_a_lone_surrogate_is_no_crash(run):
    rewritten(run / "run.json", lambda value: value | {"request": "broken \ud800 name"})
    assert "broken ? name" in report.write(run).read_text(encoding="utf-8")


def test_one_point_has_no_slider(run):
    rewritten(run / "alpha.json", lambda value: value | {"curve": value["curve"][-1:], "alpha": 2.0})
    page = Page(report.write(run).read_text(encoding="utf-8"))
    assert not page.all("input")
    assert "One strength was measured" in page.text


def test_a_curve_without_retain_or_with_odd_numbers(run):
    def change(value):
        for point in value["curve"]:
            point["retain"] = None
        value["curve"][1]["forget"] = float("nan")

    rewritten(run / "alpha.json", change)
    curve = report.read(run).curve
    text = report.write(run).read_text(encoding="utf-8")
    assert len(curve) == len(json.loads((run / "alpha.json").read_text())["curve"]) - 1
    assert "NaN" not in re.search(r'id="points">(.*?)</script>', text)[1]


def test_a_finer_curve_adds_its_points(run):
    write_json(run / "curve.json", [{"alpha": value / 10, "forget": 0.5, "retain": 0.9} for value in range(21)])
    curve = report.read(run).curve
    assert [alpha for alpha, _, _ in curve] == sorted({alpha for alpha, _, _ in curve})
    assert {value / 10 for value in range(21)} <= {alpha for alpha, _, _ in curve}
    text = report.write(run).read_text(encoding="utf-8")
    assert all(f"<td>{words.percent(forget)}</td>" in text for _, forget, _ in curve)


def test_removed_outputs_are_said_of_the_curve(run):
    text = report.write(run).read_text(encoding="utf-8")
    assert "removed outputs of the classifier put back" in text
    parts = report.read(run)
    write_json(run / "curve.json", [{"alpha": parts.alpha, "forget": 0.54, "retain": 0.9}])
    text = report.write(run).read_text(encoding="utf-8")
    after = view.view(parts)["outcome"][0]["after"]
    assert f"forget accuracy is {words.percent(0.54)} with them in and, as above, {after} without." in text
    rewritten(run / "edit" / "edit.json", lambda value: value | {"removed": []})
    assert "put back" not in report.write(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["run.json", "diagnosis.json", "edit/edit.json"])
def test_a_directory_that_is_no_run_says_what_is_missing(run, name):
    (run / name).unlink()
    with pytest.raises(FileError, match=f"{name} missing"):
        report.write(run)


def test_errors_name_the_file_and_leave_the_old_report(run, tmp_path):
    old = report.write(run).read_bytes()
    for name, content in (("run.json", "{"), ("alpha.json", "[]"), ("diagnosis.json", "\xff\xfe")):
        kept = (run / name).read_bytes()
        (run / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(FileError, match=name):
            report.write(run)
        (run / name).write_bytes(kept)
    rewritten(run / "diagnosis.json", lambda value: value | {"layers": {"0": {"edited": True}}})
    with pytest.raises(FileError, match="another version"):
        report.write(run)
    assert (run / "report.html").read_bytes() == old
    with pytest.raises(FileError, match="no directory"):
        report.write(tmp_path / "nowhere")


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_without_the_extra_the_error_names_it(run, module, monkeypatch):
    pages._template.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnmergeError, match=rf"{module}.*unmerge\[report\]") as caught:
        report.write(run)
    assert isinstance(caught.value, ImportError)


def test_hundreds_of_layers_stay_below_a_megabyte(finished_run):
    parts = report.read(finished_run)
    layer = max(parts.diagnosis["layers"].values(), key=lambda entry: len(entry["forget_spectrum"]))
    many = {
        f"model.layers.{place}.mlp.down_proj": layer
        | {"edited": place >= 225, "overlaps": [0.3] * 16, "cosines": [place / 400] * 16, "gains": [0.5] * 16}
        for place in range(300)
    }
    page = report.render(replace(parts, diagnosis={**parts.diagnosis, "layers": many}))
    assert len(page.encode()) < 1_000_000


@pytest.mark.parametrize("verdict", ["separable", "entangled", "instance-like"])
def test_every_verdict_has_its_tone(finished_run, verdict):
    parts = report.read(finished_run)
    found = parts.diagnosis["verdict"] | {"kind": verdict, "ratio": None, "control": None}
    page = report.render(replace(parts, diagnosis={**parts.diagnosis, "verdict": found}))
    assert f'class="verdict {verdict}"' in page
    assert "not measured" in page


def test_text_stands_out_from_its_ground(text):
    """Contrast of at least 4.5 (WCAG AA) for every pair of text and ground that the page uses, light and dark."""
    rules = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", rules[0]))
    dark = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", rules[1]))
    assert light.keys() == dark.keys()

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [(word, ground) for word in ("ink", "muted") for ground in ("paper", "raised", "edited")]
    pairs += [(word, "paper") for word in ("forget", "retain", "accent", "good")]
    for tone in ("good", "warn", "bad"):
        pairs += [(word, f"{tone}-soft") for word in (tone, "ink", "muted")]
    for theme in (light, dark):
        for word, ground in pairs:
            high, low = sorted((luminance(theme[word]), luminance(theme[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (word, ground, theme[word], theme[ground])


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.4963, "49.6\u202f%"), (None, "–"), (float("nan"), "–"), (1.0, "100.0\u202f%")],
)
def test_percent(value, said):
    assert words.percent(value) == said


def test_seconds_and_names():
    assert [words.seconds(value) for value in (0.5, 12.34, 75, 7500, None)] == [
        "0.50\u202fs",
        "12.3\u202fs",
        "1\u202fmin 15\u202fs",
        "2\u202fh 05\u202fmin",
        "–",
    ]
    assert words.shortened("a" * 50, 10) == "…" + "a" * 9
    assert words.shortened("", 10) == "(model)"
    assert [words.number(value) for value in (0.12345, 1234.5, 7, "word", None)] == ["0.123", "1,234", "7", "word", "–"]
