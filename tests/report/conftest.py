"""One real run for all tests of this folder, copies of it to change, and a real browser."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from digits_run import write_run

from unmerge import report


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """A run directory and its report; not to be changed."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory)
    report.write(directory)
    return directory


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of the run without its report, free to be changed."""
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    (directory / "report.html").unlink()
    return directory


@pytest.fixture(scope="session")
def chromium() -> tuple[str, str]:
    """The paths of Debian's Chromium and its driver, installed where that is possible."""
    names = ("chromium", "chromedriver")
    if not all(map(shutil.which, names)) and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        install = "apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver"
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        try:
            subprocess.run(["sh", "-c", install], env=environment, capture_output=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("installing Chromium took longer than 300 s")
    paths = [shutil.which(name) for name in names]
    if not all(paths):
        pytest.skip("there is no Chromium and none could be installed: apt-get install chromium chromium-driver")
    return tuple(paths)


@pytest.fixture(scope="session")
def browser(chromium):
    """A headless Chromium that logs its console and its network."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="the browser tests need selenium: pip install selenium"
    )
    from selenium.webdriver.chrome.service import Service

    program, driver = chromium
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_page_load_timeout(30)
    yield opened
    opened.quit()
