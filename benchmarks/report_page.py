"""Measures the page of a report: its size, and when a browser has made it interactive.

    fedalign run synth-medium --out runs/synth-medium
    python benchmarks/report_page.py runs/synth-medium/report.html

Needs Playwright, which ``make setup`` installs, and a Chromium.
"""

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

READY = """
new MutationObserver(() => {
  if (document.documentElement?.dataset.ready && !window.interactive) window.interactive = performance.now();
}).observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] });
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=found, args=arguments) as browser:
            measured = []
            for _ in range(options.times):
                page = browser.new_page()
                page.add_init_script(READY)
                page.goto(options.page.resolve().as_uri())
                page.wait_for_selector("html[data-ready]")
                measured.append(page.evaluate("window.interactive") / 1000)
                page.close()
    print(f"{options.page.stat().st_size / 1e6:.2f} MB; interactive after {sorted(measured)[len(measured) // 2]:.2f} s")


if __name__ == "__main__":
    main()
