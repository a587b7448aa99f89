"""The README's picture of the page: the embedded pair answering, as the browser tests see it.

    python -m tests.serve.screenshot infra/serve/page.png [--dark] [--width 860] [--height 800]

Every step drafts (speculative.budget uniform), so that the picture does not hang on how busy the
machine is.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.serve.app import build_app
from eagle_ray.serve.service import Service
from tests.support.serving import browser, serving

CONFIG = Path(__file__).parent.parent.parent / "configs" / "serve_demo.yaml"
QUESTION = "I need five tips for hiking."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=860)
    parser.add_argument("--height", type=int, default=640)
    asked = parser.parse_args()
    service = Service.start(
        load_serve_config(CONFIG, env={}, sets=["speculative.budget=uniform"]),
        WorkerPlan(threads=2),
    )
    try:
        with (
            serving(build_app(service)) as server,
            tempfile.TemporaryDirectory() as profile,
            browser(profile, asked.width, asked.height, asked.dark) as driver,
        ):
            driver.get(server.url)
            _ask(driver, QUESTION)
            _hover(driver)
            clip = {"x": 0, "y": 0, "width": asked.width, "height": asked.height, "scale": 1.5}
            image = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
            asked.path.write_bytes(base64.b64decode(image["data"]))
    finally:
        service.close()


def _ask(driver, question: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    box = driver.find_element("id", "question")
    box.send_keys(question)
    box.submit()
    WebDriverWait(driver, 60).until(
        lambda _: not driver.find_elements("css selector", "[aria-busy=true]")
    )


def _hover(driver) -> None:
    from selenium.webdriver import ActionChains

    words = [
        word for word in driver.find_elements("css selector", ".text .d2") if word.text.strip()
    ]
    ActionChains(driver).move_to_element(words[len(words) // 2]).perform()


if __name__ == "__main__":
    main()
