"""The page in a real browser: it opens without a network, everything on it can be used, and nobody is left out."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from fedalign.cli import main
from fedalign.report.page import render_page
from fedalign.report.read_runs import read_run
from fedalign.report.serve import LiveReport, ReportServer

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARMS = "priority,all,local,fedalign,auto"
HARM = "<img src=x onerror=\"document.title='owned'\">"
SMALL = ["--set", "data.samples=40", "--set", "data.priority=2", "--set", "data.free=3"]


def run(out, *more, rounds=24, arms=ARMS):
    settings = [
        "run",
        "synth-low",
        "--seeds",
        "2",
        "--rounds",
        str(rounds),
        "--arms",
        arms,
        "--quiet",
        "--device",
        "cpu",
    ]
    assert main([*settings, *SMALL, *more, "--out", str(out)]) == 0
    return out


def change_clients(folder, change):
    for log in folder.glob("*/seed-*/rounds.jsonl"):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        for row in rows:
            change(row["clients"])
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages of a run whose last client has a hostile name, of two runs, and of a verified run with an attack."""
    folder = tmp_path_factory.mktemp("browser")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedalign.report.page.gallery", lambda run: [])  # the pictures for papers are not looked at here
        make_pages(folder)
    return folder


def make_pages(folder):
    first = run(folder / "first")
    change_clients(first, lambda clients: clients[-1].update(name=HARM, reason=f"</script><script>{HARM}</script>"))
    second = run(folder / "second", "--set", "local.lr=0.03", arms="priority,auto")
    attacked = run(
        folder / "verified", "--set", "trust=verify", "--set", "adversary.kind=sign-flip", "--set",
        "adversary.fraction=0.34", arms="priority,auto",
    )  # fmt: skip
    many = run(folder / "many", "--set", "data.free=30", "--set", "data.samples=20", rounds=2, arms="all")
    pages = {"one": [first], "two": [first, second], "verified": [attacked], "many": [many]}
    for name, folders in pages.items():
        (folder / f"{name}.html").write_text(render_page([read_run(one) for one in folders]), encoding="utf-8")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = [path for path in map(shutil.which, NAMES) if path] or [started.chromium.executable_path]
        if not Path(found[0]).exists():
            pytest.skip("there is no Chromium on this machine: install one, or run `playwright install chromium`")
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        with started.chromium.launch(executable_path=found[0], args=options) as chromium:
            yield chromium


class Tab:
    """A page in the browser: requests that leave the machine are refused and noted, as are errors."""

    def __init__(self, browser, address, width=1200, **options):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.asked, self.errors = [], []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def ready(self):
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)
        return self.page


@pytest.fixture
def tabs(browser, files):
    opened = []

    def open_page(name="one", where="", **options):
        tab = Tab(browser, f"{(files / f'{name}.html').as_uri()}{where}", **options)
        opened.append(tab)
        return tab

    yield open_page
    for tab in opened:
        tab.context.close()
        assert tab.errors == []


def legend(page):
    return page.inner_text("#curves .readout")


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_it_opens_without_a_network(tabs):
    tab = tabs()
    page = tab.ready()
    assert all(address.startswith(("file:", "data:")) for address in tab.asked)
    assert len([address for address in tab.asked if address.startswith("file:")]) == 1
    assert page.locator("#curves canvas").count() == 1
    assert "best shared model" in page.inner_text("#summary")
    assert all(arm in legend(page) for arm in ARMS.split(","))


def test_without_scripts_the_words_and_tables_are_there(tabs):
    page = tabs(java_script_enabled=False).page
    assert "best shared model" in page.inner_text("#summary")
    assert "The curves need JavaScript" in page.inner_text("#figures")
    assert page.locator("#costs table").count() == 1


def test_arms_and_seeds_are_switched_off_and_on(tabs):
    page = tabs().ready()
    page.get_by_role("checkbox", name="all", exact=True).uncheck()
    assert "all" not in legend(page).split()
    assert "auto" in legend(page).split()
    before = legend(page)
    page.get_by_role("checkbox", name="seed 1").uncheck()
    assert legend(page) != before
    assert "±" not in legend(page)
    page.get_by_role("checkbox", name="all", exact=True).check()
    assert "all" in legend(page).split()


def test_figures_spreads_differences_costs_and_smoothing(tabs):
    page = tabs().ready()
    page.get_by_label("Figure", exact=True).select_option("train_loss")
    assert "%" not in legend(page)
    page.get_by_label("Figure", exact=True).select_option("test_accuracy")
    page.locator("#curves").get_by_label("Show").select_option("priority")
    assert "priority 0.0" in " ".join(legend(page).split())
    page.locator("#curves").get_by_label("Show").select_option("")
    page.get_by_label("Spread over seeds").select_option("seeds")
    page.get_by_label("Spread over seeds").select_option("quartiles")
    before = legend(page)
    page.get_by_label("Smoothing").fill("5")
    assert "5 rounds" in page.inner_text("#curves .controls >> nth=0")
    assert legend(page) != before
    page.get_by_label("Against", exact=True).select_option("sent")
    assert "local" not in legend(page).split()  # sends no models
    page.locator("#curves summary").click()
    assert page.locator("#curves details table tbody tr").count() == 11


def test_hover_zoom_and_keys(tabs):
    page = tabs().ready()
    area = page.locator("#curves .u-over")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    assert "round: 1" in legend(page)
    reset = page.locator("#curves").get_by_role("button", name="Reset zoom")
    assert reset.is_disabled()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, middle)
    page.mouse.up()
    assert reset.is_enabled()
    reset.click()
    assert reset.is_disabled()
    page.locator("#curves .plot").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "round: 2" in page.text_content("#announcements")
    page.keyboard.press("+")
    assert reset.is_enabled()
    page.keyboard.press("0")
    assert reset.is_disabled()


@pytest.mark.parametrize("way", ["mouse", "keyboard"])
def test_a_clients_page_opens_from_the_map(tabs, way):
    page = tabs().ready()
    page.locator("#map").get_by_label("Arm", exact=True).select_option("auto")
    if way == "mouse":
        page.locator("#map canvas.strip").first.click()
    else:
        page.locator("#map tbody a").first.focus()
        page.keyboard.press("Enter")
    page.wait_for_selector("#client h1")
    assert page.is_hidden("#report")
    text = page.inner_text("#client")
    assert "Free client" in text
    assert "Is it better off?" in text
    assert "Weight in the aggregate" in text
    assert page.locator("#client tbody tr.picked").count() == (1 if way == "mouse" else 0)
    reasons = page.locator("#client .tall td.words").all_inner_texts()
    assert len(reasons) == 24
    assert all(reasons)
    page.locator("#client").get_by_label("Arm", exact=True).select_option("all")
    assert "everyone is admitted" in page.inner_text("#client")
    page.go_back()
    page.wait_for_selector("#report:not([hidden])")


def test_the_map_is_read_under_the_pointer(tabs):
    page = tabs().ready()
    page.locator("#map canvas.strip").last.hover()
    assert ", round 1" in page.inner_text("#map")
    page.locator("#map").get_by_label("Seed", exact=True).select_option("1")
    assert "refused" in page.inner_text("#map .legend")


def test_a_stranger_writes_no_html(tabs):
    page = tabs().ready()
    assert page.locator("#map a", has_text="onerror").count() == 1
    page.locator("#map a", has_text="onerror").click()
    page.wait_for_selector("#client h1")
    assert HARM in page.inner_text("#client h1")
    assert "</script>" in page.inner_text("#client .tall")
    assert page.locator("img").count() == 0
    assert page.title() == "synth-low"


def test_verified_choices_contributions_and_hostile_clients(tabs):
    page = tabs("verified").ready()
    assert "hostile" in page.inner_text("#map")
    assert "candidates" in page.inner_text("#choices")
    assert page.locator("#choices .chart").count() == 2  # the choices, and what they promise
    page.locator("#choices input[type=range]").fill("10")
    assert "Round 10:" in page.inner_text("#choices")
    page.locator("#map tbody a").first.click()
    assert "Contribution" in page.inner_text("#client")
    assert "changed their loss" in page.inner_text("#client")


def test_autoalign_tells_its_epsilon(tabs):
    page = tabs().ready()
    page.locator("#choices").get_by_label("Show").select_option("epsilon")
    assert "chosen ε" in page.inner_text("#choices .readout")
    page.locator("#choices summary").click()
    page.wait_for_selector("#choices details table")
    assert "ε = " in page.inner_text("#choices details")


def test_the_border_that_fedalign_admits_within(tabs):
    page = tabs(where="#client=3&arm=fedalign").ready()
    assert "F(w) + ε" in page.inner_text("#client .readout >> nth=0")


def test_clients_are_found_by_name(tabs, files):
    page = tabs("many").ready()
    assert page.locator("#map tbody tr:visible").count() == 30
    page.get_by_label("Find a client").fill("FREE-29")
    assert page.locator("#map tbody tr:visible").all_inner_texts()[0].startswith("free-29")
    assert page.locator("#map tbody tr:visible").count() == 1


def test_several_runs_are_named_by_what_differs(tabs):
    page = tabs("two").ready()
    text = legend(page)
    assert "auto · lr=0.03" in text
    assert "auto · lr=0.1" in text
    assert "local.lr" in page.inner_text("#settings")
    page.locator("#map").get_by_label("Run", exact=True).select_option("1")
    assert page.locator("#map").get_by_label("Arm", exact=True).locator("option").all_inner_texts() == [
        "priority",
        "auto",
    ]


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["one", "two", "verified"])
def test_no_sideways_scrolling(tabs, name, width):
    page = tabs(name, width=width).ready()
    assert fits(page)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert fits(page)
    page.locator("#map tbody a").last.click()
    page.wait_for_selector("#client h1")
    assert fits(page)


def test_both_themes(tabs):
    def background(page):
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    light, dark = (tabs(color_scheme=scheme).ready() for scheme in ("light", "dark"))
    assert background(light) == "rgb(255, 255, 255)"
    assert background(dark) == "rgb(20, 23, 28)"
    light.get_by_label("Theme").select_option("dark")
    assert background(light) == background(dark)
    dark.get_by_label("Theme").select_option("light")
    assert background(dark) == "rgb(255, 255, 255)"
    dark.reload()
    dark.wait_for_selector("html[data-ready]")
    assert background(dark) == "rgb(255, 255, 255)"  # remembered


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(tabs, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for name in ("two", "verified"):
        page = tabs(name, color_scheme=scheme).ready()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        for view in ("report", "client"):
            if view == "client":
                page.locator("#map tbody a").first.click()
                page.wait_for_selector("#client h1")
            found = axe.run(page).response["violations"]
            bad = [
                (one["id"], [node["html"][:200] for node in one["nodes"]])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert bad == [], (name, view)


def test_a_live_page_follows_the_run(browser, files, tmp_path):
    folder = tmp_path / "growing"
    shutil.copytree(files / "second", folder)
    whole = {log: log.read_bytes().splitlines(keepends=True) for log in folder.glob("*/seed-*/rounds.jsonl")}

    def reach(rounds):
        for log, lines in whole.items():
            log.write_bytes(b"".join(lines[:rounds]) + lines[rounds][:40])  # the last line is not complete

    def wait_for(rounds):
        page.wait_for_function(f"document.getElementById('live').textContent.includes('round {rounds} of 24')")

    for log in whole:
        log.unlink()
    (folder / "summary.json").unlink()
    with ReportServer(LiveReport([folder])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        tab = Tab(browser, server.address)
        try:
            page = tab.ready()
            assert "round 0 of 24" in page.inner_text("#live")
            assert "No round has a figure" in page.inner_text("#curves")
            page.evaluate("window.stays = true")
            reach(9)
            wait_for(9)
            page.get_by_role("checkbox", name="auto").uncheck()
            reach(15)
            wait_for(15)
            assert page.evaluate("window.stays")  # the page was not loaded again
            assert not page.get_by_role("checkbox", name="auto").is_checked()
            page.locator("#curves .plot").focus()
            page.keyboard.press("End")
            assert "round: 15" in page.text_content("#announcements")
            assert tab.errors == []
        finally:
            tab.context.close()
            server.shutdown()
            thread.join()
