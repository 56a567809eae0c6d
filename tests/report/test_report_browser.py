"""The report in a real browser: no request, no error, a slider for keys and pointer, nothing wider than the screen."""

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from unmerge import report


def screenshots() -> Path | None:
    """Where a person looks at the pictures: UNMERGE_SCREENSHOTS, else pytest's own folder."""
    return Path(os.environ["UNMERGE_SCREENSHOTS"]) if "UNMERGE_SCREENSHOTS" in os.environ else None


def sized(browser, width, scheme="light"):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def opened(browser, path):
    browser.get_log("browser"), browser.get_log("performance")  # what came before is not of this page
    browser.get(path.as_uri())


def requests(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [entry["params"]["request"]["url"] for entry in messages if entry["method"] == "Network.requestWillBeSent"]


def shown(browser, name):
    return browser.find_element("id", name).text


@pytest.fixture
def page(browser, finished_run):
    sized(browser, 1280)
    path = finished_run / "report.html"
    opened(browser, path)
    return browser


def test_no_request_and_no_console_message(page, finished_run):
    urls = requests(page)
    own = (finished_run / "report.html").as_uri()
    assert own in urls
    assert all(url == own or url.startswith("data:") for url in urls), urls
    assert page.get_log("browser") == []


def test_the_slider_follows_the_keyboard(page, finished_run):
    from selenium.webdriver.common.keys import Keys

    search = json.loads((finished_run / "alpha.json").read_text())
    slider = page.find_element("id", "alpha")
    assert float(shown(page, "at-alpha")) == search["alpha"]
    assert shown(page, "at-kind") == "measured"
    chosen = next(point for point in search["curve"] if point["alpha"] == search["alpha"])
    assert shown(page, "at-forget").startswith(f"{100 * chosen['forget']:.1f}")
    marks = [mark.get_attribute("transform") for mark in page.find_elements("css selector", ".wide .cursor .forget")]

    slider.send_keys(Keys.HOME)
    first = search["curve"][0]
    assert float(shown(page, "at-alpha")) == first["alpha"] == 0
    assert shown(page, "at-forget").startswith(f"{100 * first['forget']:.1f}")
    assert shown(page, "at-retain").startswith(f"{100 * first['retain']:.1f}")
    moved = [mark.get_attribute("transform") for mark in page.find_elements("css selector", ".wide .cursor .forget")]
    assert moved != marks

    for _ in range(7):
        slider.send_keys(Keys.ARROW_RIGHT)
    assert 0 < float(shown(page, "at-alpha")) < search["curve"][1]["alpha"]
    assert shown(page, "at-kind").startswith("interpolated")
    assert shown(page, "at-forget").startswith("≈")
    said = slider.get_attribute("aria-valuetext")
    assert "interpolated" in said
    assert shown(page, "at-alpha") in said

    page.find_element("id", "to-chosen").click()
    assert float(shown(page, "at-alpha")) == search["alpha"]
    assert page.get_log("browser") == []


def test_interpolation_is_linear_between_the_neighbours(page, finished_run):
    curve = json.loads((finished_run / "alpha.json").read_text())["curve"]
    low, high = curve[0], curve[1]
    middle = round((low["alpha"] + high["alpha"]) / 2, 2)
    page.execute_script(
        "const s = document.getElementById('alpha'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        middle,
    )
    share = (middle - low["alpha"]) / (high["alpha"] - low["alpha"])
    expected = 100 * (low["forget"] + share * (high["forget"] - low["forget"]))
    assert float(shown(page, "at-forget").strip("≈ %\u202f")) == pytest.approx(expected, abs=0.06)


def test_the_copy_button_takes_the_command(page, finished_run):
    command = json.loads((finished_run / "run.json").read_text())["command"]
    button = page.find_element("id", "copy")
    assert button.is_displayed()
    button.click()
    assert page.execute_script("return getSelection().toString()") == command
    assert button.text in ("Copied", "Selected", "Copy")


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_can_be_looked_at(page, width, scheme, tmp_path):
    sized(page, width, scheme)
    page.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    across = page.execute_script("return document.documentElement.scrollWidth")
    assert across <= width
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in ground[4:-1].split(",")) > 380
    assert light == (scheme == "light")
    shapes = page.find_elements("css selector", "svg.chart")
    seen = {shape.get_attribute("class").split()[-1] for shape in shapes if shape.is_displayed()}
    assert seen == {"narrow" if width < 720 else "wide"}
    small = page.execute_script(
        "return [...document.querySelectorAll('svg.chart')].filter((c) => c.checkVisibility()).flatMap((c) =>"
        "[...c.querySelectorAll('text')].map((t) => parseFloat(getComputedStyle(t).fontSize) * c.getScreenCTM().a))"
    )
    assert min(small) > 9, "text of a chart is too small to read"
    folder = screenshots() or tmp_path / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    picture = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": {
        "x": 0, "y": 0, "width": width, "scale": 1,
        "height": page.execute_script("return document.documentElement.scrollHeight"),
    }})  # fmt: skip
    target = folder / f"report-{width}-{scheme}.png"
    target.write_bytes(base64.b64decode(picture["data"]))
    assert target.stat().st_size > 20_000


def test_it_prints(page, tmp_path):
    sized(page, 1280, "dark")
    printed = page.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    folder = screenshots() or tmp_path / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.pdf").write_bytes(base64.b64decode(printed["data"]))
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_hostile_words_run_nothing(browser, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    attack = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    run = json.loads(path.read_text())
    run |= {"request": attack, "model": attack, "command": attack}
    for sample in run["samples"]:
        sample["label"] = attack
    path.write_text(json.dumps(run))
    opened(browser, report.write(tmp_path / "run"))
    assert browser.title.startswith("Forgetting </script>")
    assert shown(browser, "command") == attack
    assert browser.get_log("browser") == []
    assert len(requests(browser)) >= 1
