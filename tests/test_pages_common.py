"""Common properties of the three pages in a real browser: accessibility, keyboard, damage."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from page_exports import HOSTILE_NAME, needs_browser

from tools.browser import SHOWN, opened_page, served

pytestmark = needs_browser

CONTROLS = ("button:not(:disabled), select:not(:disabled), summary, textarea, "
            "input:not(:disabled):not([type=radio]:not(:checked))")


@dataclasses.dataclass(frozen=True)
class Site:
    """A page, and how the tests use it."""

    page_file: Path
    fragment: str  # fragment of a view with many parts of the page
    extend: tuple[str, ...]  # names of buttons that add further parts
    another: str  # fragment of a view that needs other data

    @property
    def address(self) -> str:
        return f"{self.page_file.as_uri()}#{self.fragment}"


@pytest.fixture(scope="module", params=["panel", "maze", "attribution"])
def site(request):
    page_file = request.getfixturevalue(f"{request.param}_export").page_file
    return {"panel": Site(page_file, "sample=informed_init/1&beside=informed_init/2&step=2",
                          ("Add a filter",), "sample=informed_init/4&step=1"),
            "maze": Site(page_file, "patch=zero%40embedder.block2.res1.resadd%3A3",
                         ("+ Cheese vector", "+ Set a channel at a square", "Channel"),
                         "level=5"),
            "attribution": Site(page_file, "layer=block3&row=value&beside=2", ("Add a row",),
                                "layer=block3&trajectory=2&frame=3")}[request.param]


@pytest.fixture(scope="module")
def opened_once(browser, site):
    with opened_page(browser, site.address, viewport={"width": 1400, "height": 1000}) as page:
        yield page


@pytest.fixture
def page(opened_once, site):
    """The page, loaded again: that takes a third of the time of a new browser context."""
    load(opened_once, site.address)
    return opened_once


def load(page, address):
    """Load an address, even if it is another view of the same page."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(SHOWN)


def extend(page, site):
    for name in site.extend:
        page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_selector(SHOWN)


def test_opens_from_disk_and_from_a_server_and_requests_nothing_else(page, site):
    texts, requested = [], []
    page.on("request", lambda request: requested.append(request.url))
    with served(site.page_file.parent) as server:
        for address in (site.page_file.as_uri(), server, f"{server}index.html"):
            requested.clear()
            load(page, f"{address}#{site.fragment}")
            page.evaluate(f"location.hash = '{site.another}'")
            page.wait_for_timeout(300)
            page.wait_for_selector(SHOWN)
            own = (address.removesuffix("index.html"), "data:", "blob:", "about:blank")
            assert requested and all(url.startswith(own) for url in requested), requested
            text = re.sub(r"[\d.]+ (ms|s)\b", "", page.locator("main").inner_text())
            texts.append((page.title(), text))
    assert texts[0] == texts[1] == texts[2]


def test_a_page_saved_as_one_file_shows_the_same(browser, page, site, tmp_path):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as one HTML file").click()
    assert download.value.suggested_filename.endswith(".html")
    file = tmp_path / "alone" / "page.html"
    download.value.save_as(file)
    with opened_page(browser, file.as_uri(), viewport={"width": 1400, "height": 1000}) as alone:
        requested = []
        alone.on("request", lambda request: requested.append(request.url))
        alone.reload()
        alone.wait_for_selector(SHOWN)
        assert all(url.startswith((file.as_uri(), "data:", "blob:")) for url in requested)
        assert alone.title() == page.title()
        texts = [re.sub(r"[\d.]+ (ms|s)\b", "", each.locator("main").inner_text())
                 for each in (page, alone)]
        assert texts[0] == texts[1]
        canvases = [each.locator("main canvas").evaluate_all(
            "all => all.map((each) => each.toDataURL())") for each in (page, alone)]
        assert canvases[0] == canvases[1]
        assert alone.evaluate("window.owned") is None


def test_every_control_is_reached_and_seen_with_the_tab_key(page, site):
    extend(page, site)
    count = page.evaluate(f"document.querySelectorAll('{CONTROLS}').length")
    page.evaluate("document.activeElement.blur()")
    invisible = []
    for _ in range(count + 5):
        page.keyboard.press("Tab")
        name, outline, shadow = page.evaluate("""() => {
            const here = document.activeElement
            if (here === document.body) return ['body', 'auto', ''] // after the last one
            here.dataset.reached = 'yes'
            const style = getComputedStyle(here)
            return [here.outerHTML.slice(0, 90), style.outlineStyle, style.boxShadow]
        }""")
        if outline == "none" and shadow in ("none", ""):
            invisible.append(name)
    missed = page.evaluate("""(controls) => [...document.querySelectorAll(controls)].filter(
        (each) => !each.dataset.reached && each.checkVisibility()).map((each) => each.outerHTML)
        """, CONTROLS)
    assert not missed and not invisible


def test_everything_has_a_name_for_screen_readers(page, site):
    extend(page, site)
    nameless = []
    for role in ("button", "combobox", "spinbutton", "slider", "textbox", "checkbox", "radio",
                 "img", "application"):
        nameless += page.get_by_role(role).evaluate_all("""(all) => all.filter((each) => {
            const name = each.getAttribute('aria-label')
                || [...(each.labels ?? [])].map((label) => label.textContent).join('')
                || each.textContent
            return !/[A-Za-z]{2}|[0-9]/.test(name) // a sign alone is none
        }).map((each) => each.outerHTML)""")
    assert not nameless
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.locator("canvas:not([role]):not([aria-hidden=true])").count() == 0


def test_what_is_typed_and_named_is_text(page, site):
    before = page.locator("main").evaluate("(each) => each.innerText")
    field = page.get_by_role("textbox", name="Notes")
    field.click()
    page.keyboard.type("<img src=x onerror='window.owned=1'>")
    for key in ("ArrowLeft", "Home", "ArrowRight", "End"):  # the view does not change
        page.keyboard.press(key)
    assert page.locator("main").evaluate("(each) => each.innerText") == before
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(SHOWN)
    assert field.input_value() == "<img src=x onerror='window.owned=1'>"
    shown = page.evaluate("""() => document.documentElement.textContent
        + [...document.querySelectorAll('input')].map((each) => each.value)""")
    assert HOSTILE_NAME.split("</title>")[0] in shown
    assert page.evaluate("window.owned") is None
    assert page.locator("img, h1 *, main script").count() == 0


def test_pages_do_not_scroll_sideways(browser, site):
    with opened_page(browser, site.address, has_touch=True) as page:
        extend(page, site)
        for width in (360, 375, 499, 768, 1024, 1500):
            page.set_viewport_size({"width": width, "height": 740})
            page.wait_for_timeout(100)
            for is_open in (False, True):
                page.locator("details").evaluate_all(
                    "(all, to) => all.forEach(each => { each.open = to })", is_open)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                outside = page.evaluate("""(width) => [...document.querySelectorAll(
                    'button, select, input, textarea, canvas')].filter((each) => {
                        const box = each.getBoundingClientRect()
                        return each.checkVisibility() && (box.right > width + 1 || box.left < -1)
                    }).map((each) => each.outerHTML)""", width)
                assert not outside, width
        small = page.evaluate("""() => [...document.querySelectorAll('button, select')].filter(
            (each) => each.checkVisibility() && each.getBoundingClientRect().height < 24).map(
            (each) => each.outerHTML)""")
        assert not small


def contrast(a, b):
    """Return the contrast of two colours "#rrggbb", as defined by WCAG."""
    def luminance(colour):
        shares = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted(map(luminance, (a, b)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast_and_follow_the_system(page, scheme):
    surface = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate("""() => {
        const style = getComputedStyle(document.documentElement)
        return Object.fromEntries(['surface', 'raised', 'ink', 'muted', 'accent', 'other',
            'line-strong', 'simulated', 'raises', 'lowers', 'lowers-text'].map((name) => [name,
            style.getPropertyValue(`--${name}`).trim().replace(
                /^#(.)(.)(.)$/, '#$1$1$2$2$3$3')]))
    }""")
    background = page.evaluate(surface)
    assert [*map(int, re.findall(r"\d+", background)[:3])] == [
        int(colours["surface"][i:i + 2], 16) for i in (1, 3, 5)]
    assert (contrast(colours["surface"], "#ffffff") > 5) == (scheme == "dark")
    for text in ("ink", "muted", "lowers-text"):
        for ground in ("surface", "raised"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("accent", "other", "line-strong", "simulated", "raises", "lowers"):
        assert contrast(colours[mark], colours["surface"]) >= 3, mark
    moving = page.evaluate("""() => [...document.querySelectorAll('*')].filter((each) => {
        const style = getComputedStyle(each)
        return style.animationName !== 'none' || !/^0s(, 0s)*$/.test(style.transitionDuration)
    }).map((each) => each.outerHTML)""")
    assert not moving  # nothing moves except during playback
    faded = page.evaluate("""() => [...document.querySelectorAll('*')].filter((each) =>
        getComputedStyle(each).opacity < 1 && each.textContent.trim()
        && !each.closest(':disabled')).map((each) => each.outerHTML)""")
    assert not faded  # which lowers the contrast
    theme = page.get_by_role("combobox", name="Theme")
    theme.select_option("light" if scheme == "dark" else "dark")
    page.reload()
    page.wait_for_selector(SHOWN)
    chosen = page.evaluate(surface)
    theme.select_option("auto")
    assert page.evaluate(surface) == background != chosen


def test_a_damaged_manifest_is_named(browser, site, tmp_path):
    copy = shutil.copytree(site.page_file.parent, tmp_path / "page")
    (copy / "data" / "manifest.js").write_text("panelData(")
    page = browser.new_page()
    page.goto((copy / site.page_file.name).as_uri())
    alert = page.get_by_role("alert")
    alert.wait_for(timeout=10_000)
    assert "data/manifest.js is missing or damaged" in alert.inner_text()
    page.close()
