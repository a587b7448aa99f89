"""The web page in a real browser, over a real engine: colours, figures, stopping, errors, text that stays text."""

import asyncio
import copy
import http.client
import json
import time
from collections import Counter

import pytest

from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.app import build_app
from tests.support.serving import CHROMIUM, DRIVER, FRANCE, browser, get, post, request, serving

TIPS = "I need five tips for hiking."
CODE = "I need a Python function that returns the average of the doubles of the numbers that are negative."
NOISE = {
    "max_tokens": 1500,
    "temperature": 20,
    "seed": 8,
}  # every kind of token, and the end is not among them


@pytest.fixture(scope="module")
def server(app):
    with serving(app) as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(
            "no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)"
        )
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(chromium, server):
    """Fresh, without settings; whatever the browser itself complains of fails the test."""
    chromium.get(server.url)
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.get_log("browser")
    chromium.get(server.url)
    wait_until(chromium, lambda: text_of(chromium, "#model"))
    yield chromium
    told = [
        entry["message"] for entry in chromium.get_log("browser") if entry["source"] != "network"
    ]
    assert told == []


def wait_until(driver, seen, seconds=30):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, poll_frequency=0.02).until(lambda _: seen())


def all_of(driver, selector):
    return driver.find_elements("css selector", selector)


def text_of(driver, selector):
    return driver.execute_script(
        "return document.querySelector(arguments[0]).textContent", selector
    )


def ask_question(driver, text):
    box = driver.find_element("id", "question")
    box.send_keys(text)
    box.submit()


def change_settings(driver, **settings):
    """Settings, typed as a person would."""
    details = driver.find_element("id", "settings")
    if not details.get_property("open"):
        details.find_element("tag name", "summary").click()
    for name, value in settings.items():
        field = details.find_element("name", name)
        field.clear()
        field.send_keys(str(value))
    driver.find_element("id", "question").click()


def wait_for_end(driver):
    return wait_until(
        driver, lambda: all_of(driver, "article") and not all_of(driver, "[aria-busy=true]")
    )


def put_question(driver, text):
    """What the driver cannot type, or only slowly."""
    driver.execute_script("document.getElementById('question').value = arguments[0]", text)
    driver.find_element("id", "ask").submit()


def words(driver):
    """Each token of the page: its text, and how it is said to have come."""
    spans = "[...document.querySelectorAll('.text span')]"
    return driver.execute_script(
        f"return {spans}.map(w => [w.textContent, w.className, {{...w.dataset}}])"
    )


def content_of(app, question, **more):
    """What the server answers without a stream."""
    body = {"messages": [{"role": "user", "content": question}], **more}
    return asyncio.run(post(app, "/v1/chat/completions", body)).json["choices"][0]["message"][
        "content"
    ]


def metrics(app):
    lines = asyncio.run(get(app, "/metrics")).body.decode().splitlines()
    pairs = (line.removeprefix("eagle_ray_").rsplit(" ", 1) for line in lines if line[0] != "#")
    return Counter({name: float(value) for name, value in pairs})


def test_tokens_are_colored_by_depth_and_match_server_statistics(page, app):
    content, before = content_of(app, TIPS), metrics(app)
    ask_question(page, TIPS)
    wait_for_end(page)
    name = "spec_decode_num_accepted_tokens"
    wait_until(
        page, lambda: metrics(app)["generation_tokens_total"] > before["generation_tokens_total"]
    )
    grown = {key: value - before[key] for key, value in metrics(app).items()}
    num_passes, shown = grown["spec_decode_num_drafts_total"], words(page)
    assert "".join(text for text, _, _ in shown) == content
    assert len(shown) == grown["generation_tokens_total"] == int(text_of(page, ".tokens"))
    assert (
        int(text_of(page, ".passes"))
        == num_passes
        == len({data["step"] for _, _, data in shown}) - 1
    )
    assert text_of(page, ".tau") == f"{1 + grown[f'{name}_total'] / num_passes:.2f}" > "1.5"
    assert float(text_of(page, ".speed")) > 0 and float(text_of(page, ".first-token")) > 0

    assert [kind for _, kind, data in shown if data["step"] == "0"] == ["came first"]
    kinds = {data["depth"]: kind.split()[1] for _, kind, data in shown if data["step"] != "0"}
    assert kinds == {depth: f"d{depth}" for depth in kinds} and {"0", "1", "2"} <= kinds.keys()
    for depth in (1, 2, 3):
        accepted = grown[f'{name}_per_pos_total{{position="{depth - 1}"}}']
        came = sum(data["depth"] == str(depth) for _, _, data in shown)
        assert accepted - 1 <= came <= accepted  # the last step may be cut at the end
    colours = {
        w.value_of_css_property("background-color") for w in all_of(page, ".text span:not(.d0)")
    }
    assert len(colours) == len(kinds.keys() - {"0"}) + 1
    columns = page.execute_script(
        "return [...document.querySelectorAll('.strip span')].map(c => c.children.length)"
    )
    assert sum(columns) == len(shown) and len(columns) == num_passes + 1


def test_a_token_says_its_step_and_depth_to_mouse_and_keyboard(page):
    from selenium.webdriver import ActionChains, Keys

    ask_question(page, TIPS)
    wait_for_end(page)
    word = next(w for w in all_of(page, ".text .d2") if w.text.strip())
    ActionChains(page).move_to_element(word).perform()
    step, token = word.get_attribute("data-step"), word.get_attribute("data-id")
    tip = wait_until(page, lambda: page.find_element("id", "tip").text)
    assert (
        f"accepted at depth 2 · token {token}" in tip
        and f"pass {step}: " in tip
        and " of 8 drafted" in tip
    )
    lit = [w.get_attribute("data-step") for w in all_of(page, ".text .lit")]
    assert len(lit) >= 3 and set(lit) == {step} and len(all_of(page, ".strip .lit")) == 1

    page.find_element("css selector", ".text").send_keys(Keys.ARROW_RIGHT)
    assert "the prompt’s first token" in page.find_element("id", "tip").text
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("data-step") == "1"


def test_an_answer_that_comes_is_not_covered(page):
    from selenium.webdriver import ActionChains

    change_settings(page, **NOISE)
    ask_question(page, "Once")
    wait_until(page, lambda: len(all_of(page, ".text span")) > 5)
    page.execute_script(
        "document.querySelector('.text span').dispatchEvent(new Event('pointerover', {bubbles: true}))"
    )
    assert (
        all_of(page, "[aria-busy=true] .text .lit")
        and not page.find_element("id", "tip").is_displayed()
    )
    page.find_element("id", "send").click()
    wait_for_end(page)
    ActionChains(page).move_to_element(all_of(page, ".text span")[0]).perform()
    assert page.find_element("id", "tip").is_displayed()


@pytest.mark.parametrize(("deepest", "shown"), [(None, "123"), (0, ""), (10, "12345678+")])
def test_the_legend_has_the_depths_that_the_engine_drafts_to(
    page, server, service, monkeypatch, deepest, shown
):
    if deepest is not None:
        monkeypatch.setattr(service, "num_spec_tokens", deepest)
        page.get(server.url)
    wait_until(page, lambda: text_of(page, "#model"))
    depths = page.find_element("id", "depths")
    assert "".join(depth.text for depth in all_of(page, "#depths i")) == shown
    assert depths.is_displayed() == bool(shown)


def test_stop_ends_the_answer_frees_the_slot_and_chat_continues(page, service):
    change_settings(page, **NOISE, system="Be brief.")
    ask_question(page, "Once")
    wait_until(page, lambda: len(all_of(page, ".text span")) > 5)
    assert page.find_element("id", "send").text == "Stop"
    page.find_element("id", "send").click()
    wait_for_end(page)
    wait_until(page, lambda: service.in_flight.sequences == 0)
    num_words = len(words(page))
    assert page.find_element("id", "send").text == "Send" and not all_of(
        page, ".trouble:not([hidden])"
    )
    change_settings(page, max_tokens=4)
    ask_question(page, "And then?")
    wait_until(page, lambda: len(all_of(page, "article")) == 2)
    wait_for_end(page)
    assert len(words(page)) == num_words + 4


def test_markup_and_emoji_are_text(page, app):
    typed = '<img src=x onerror=alert(1)> <b>naïve</b> & "quotes" **bold**'
    ask_question(page, typed)
    wait_for_end(page)
    assert text_of(page, ".question") == typed
    page.find_element("id", "new").click()
    birds = "🦅🐟 <i>你好</i>"
    put_question(page, birds)
    wait_for_end(page)
    assert text_of(page, ".question") == birds
    page.find_element("id", "new").click()
    change_settings(page, max_tokens=90)
    ask_question(page, CODE)
    wait_for_end(page)
    assert (
        text_of(page, ".text") == (content := content_of(app, CODE, max_tokens=90))
        and "<" in content
    )
    assert all_of(page, ".question *, .text span *, .text :not(span)") == []
    page.find_element("id", "new").click()
    change_settings(page, **NOISE | {"max_tokens": 80})
    ask_question(page, TIPS)
    wait_for_end(page)
    assert text_of(page, ".text") == content_of(app, TIPS, **NOISE | {"max_tokens": 80})
    assert all_of(page, ".question *, .text span *, .text :not(span)") == []


def test_errors_are_said_in_words_and_can_be_tried_again(page, server, app):
    crowd = http.client.HTTPConnection(server.url.removeprefix("http://").rstrip("/"))
    everything = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "n": 16}
    crowd.request("POST", "/v1/completions", json.dumps(everything))
    while metrics(app)["num_requests_waiting"] < 12:
        time.sleep(0.01)
    ask_question(page, TIPS)
    wait_for_end(page)
    assert "The server is full" in page.find_element("css selector", ".trouble").text
    crowd.close()
    while metrics(app)["num_requests_running"]:
        time.sleep(0.01)
    page.find_element("css selector", ".trouble button").click()
    wait_for_end(page)
    assert not page.find_element("css selector", ".trouble").is_displayed() and len(words(page)) > 5

    change_settings(page, **NOISE)
    ask_question(page, "Once")
    wait_until(page, lambda: len(all_of(page, "article:last-child .text span")) > 5)
    server.cut()
    wait_for_end(page)
    assert "connection was lost" in all_of(page, ".trouble")[-1].text
    change_settings(page, max_tokens="", temperature="", seed="")
    put_question(page, "word " * 3000)
    wait_for_end(page)
    assert "max_model_len" in all_of(page, ".trouble")[-1].text


def test_a_key_is_asked_for_where_the_server_wants_one(chromium, service):
    guarded = copy.copy(service)
    guarded.keys = ApiKeys.of(["secret"])
    with serving(build_app(guarded)) as server:
        chromium.get(server.url)
        wait_until(chromium, lambda: "wants an API key" in text_of(chromium, "#model"))
        assert chromium.find_element("name", "key").is_displayed()
        ask_question(chromium, TIPS)
        wait_for_end(chromium)
        assert "wants an API key" in chromium.find_element("css selector", ".trouble").text
        change_settings(chromium, key="secret")
        wait_until(chromium, lambda: text_of(chromium, "#model") == "embedded:tiny")
        chromium.find_element("css selector", ".trouble button").click()
        wait_for_end(chromium)
        assert len(words(chromium)) > 5
        assert (
            chromium.execute_script("return Object.values(localStorage).includes('secret')")
            is False
        )


@pytest.mark.parametrize("width", [320, 1400])
def test_nothing_sticks_out_of_a_window(page, width):
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    ask_question(page, CODE)
    wait_for_end(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_files_have_types_and_a_strict_policy_and_are_sent_once(app):
    kinds = {"/": "text/html", "/page/page.css": "text/css", "/favicon.ico": "image/svg+xml"}
    kinds |= {f"/page/{name}.js": "text/javascript" for name in ("page", "answer", "stream")}
    for path, kind in kinds.items():
        answer = asyncio.run(get(app, path))
        assert answer.status == 200 and answer.headers["content-type"].split(";")[0] == kind
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        again = asyncio.run(get(app, path, {"If-None-Match": answer.headers["etag"]}))
        assert (again.status, again.body) == (304, b"")
        assert b"https://" not in answer.body and answer.body.count(b"http://") == (
            path == "/favicon.ico"
        )  # a namespace
    assert asyncio.run(get(app, "/page/nothing.js")).status == 404
    assert asyncio.run(request(app, "POST", "/")).status == 405
    assert asyncio.run(post(app, "/v1/chat/completions", FRANCE)).status == 200
