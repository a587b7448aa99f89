"""The page in a real browser: at any width nothing is cut, nothing scrolls sideways, and text can be read.

Needs Debian's chromium and chromium-driver, or any others on the PATH, and selenium.
"""

from __future__ import annotations

import importlib.util

import pytest

from eagle_ray.report.html import page
from tests.support.reports import SECTIONS, record, summary
from tests.support.serving import CHROMIUM, DRIVER, browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None or importlib.util.find_spec("selenium") is None,
    reason="no Chromium, chromedriver or selenium on this machine",
)
SMALLEST_PX = 11
OF_VISIBLE_TEXTS = """
return [...document.querySelectorAll("svg text")].filter(text => text.checkVisibility()).map(text => {
  const matrix = text.getScreenCTM();
  return [text.textContent, parseFloat(getComputedStyle(text).fontSize) * matrix.a,
          text.getBoundingClientRect().left, text.getBoundingClientRect().right];
});
"""
OF_CELLS = """
return [...document.querySelectorAll("td")].map(cell => [cell.textContent, cell.getBoundingClientRect().right]);
"""
SPEED = {
    "rows": 9,
    "decode_tokens_per_s": 120.0,
    "baseline_decode_tokens_per_s": 80.0,
    "speed_up": 1.5,
}
BASELINE = {
    "identical": 9,
    "differing": [],
    "total": SPEED | {"speed_up_interval": [1.4, 1.6]},
    "groups": {"code": SPEED | {"speed_up_interval": None}},
}


@pytest.fixture(scope="module")
def page_url(tmp_path_factory) -> str:
    """A page with every section there is."""
    sections = {name: value for section in SECTIONS.values() for name, value in section.items()}
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(summary(**sections, baseline=BASELINE), record()))
    return file.as_uri()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_the_page_fits_its_width_and_its_plots_can_be_read(page_url, tmp_path, width, dark):
    with browser(tmp_path, width, 900, dark) as driver:
        driver.get(page_url)
        assert driver.execute_script("return document.documentElement.scrollWidth") == width
        texts, cells = driver.execute_script(OF_VISIBLE_TEXTS), driver.execute_script(OF_CELLS)
    assert len(texts) > 40
    assert [text for text, size, _, _ in texts if size < SMALLEST_PX] == []
    assert [text for text, _, left, right in texts if left < 0 or right > width] == []
    assert [text for text, right in cells if right > width] == []
    assert "1.10" in [text for text, _ in cells]
