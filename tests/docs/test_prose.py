"""The pages can be read: every link leads to a file, no sentence is too long, and the house's words are used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
)
LONGEST = 40  # words in a sentence
AVOIDED = ("the way back", "a way back", "jury", "judges", "set aside", "who is there")


def without_code(text: str) -> str:
    """Remove fenced code blocks and comments; what is left is prose and tables."""
    return re.sub(r"<!--.*?-->", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), flags=re.S)


def sentences(text: str) -> list[str]:
    """Split prose into sentences; a blank line, a list item and a heading begin a new one, tables are left out."""
    lines = [line for line in without_code(text).splitlines() if not line.lstrip().startswith("|")]
    prose = "\n".join(
        re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", re.sub(r"^(#+ .*)$", r"\n\n\1\n\n", line)) for line in lines
    )
    parts = [
        part for paragraph in re.split(r"\n\s*\n", prose) for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", paragraph)
    ]
    return [" ".join(part.split()) for part in parts if part.strip()]


def test_sentences_are_told_apart():
    text = "# Title\nOne. Two is `longer`: *it* goes on,\neven here.\n\n- item one\n- item two\n"
    text += "\n```sh\nno prose\n```\n| a | b |\n"
    assert sentences(text) == [
        "# Title",
        "One.",
        "Two is `longer`:",
        "*it* goes on, even here.",
        "item one",
        "item two",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = without_code((ROOT / page).read_text(encoding="utf-8"))
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if target and not ((ROOT / page).parent / target).exists()]
    assert not missing, f"{page} links to files that don't exist: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_too_long(page):
    long = [s for s in sentences((ROOT / page).read_text(encoding="utf-8")) if len(s.split()) > LONGEST]
    assert not long, f"{page} has sentences of more than {LONGEST} words:\n" + "\n".join(
        f"{len(s.split())}: {s}" for s in long
    )


@pytest.mark.parametrize("page", PAGES)
def test_words_to_avoid_are_avoided(page):
    text = " ".join(without_code((ROOT / page).read_text(encoding="utf-8")).lower().split())
    assert not [word for word in AVOIDED if word in text]
