"""The table of a zoo in the Space: every entry with its figures, searched and sorted by keyboard,
and safe to open whatever the index says."""

import importlib
import re
import sys

import pytest
from support.places import ROOT
from support.reports import decided

from rotationzoo.report.page import render_page
from rotationzoo.zoo import index
from rotationzoo.zoo.lookup import LoadedIndex, choose_entry

SPACE = ROOT / "scripts" / "space"
HOSTILE = "<img src=x onerror=alert(1)>"
KEY = "-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n"


def entry(model: str, number: int = 1, **others) -> dict:
    file = {"size": number * 10**6, "sha256": f"{number:064x}"}
    copy = {"hub": "huggingface", "repo": "my/zoo", "path": f"folder/{number}"}
    files = {"rotations.safetensors": file, "README.md": file}
    return {"model": model, "recipe": "oscar", "files": files, "copies": [copy]} | others


ENTRIES = [
    entry(
        "some/Large-8B", 1, created="2026-11-20",
        summary={"perplexity_increase": 0.021, "bits_per_element": 2.53},
        evaluation=decided(0.9, f"{1:064x}"),
        signer={"identity": "me@example.org", "issuer": "https://accounts.example.org"},
    ),
    entry(
        "some/Small-1B", 12, created="2026-11-02",
        summary={"perplexity_increase": -0.001, "bits_per_element": 2.28},
        evaluation=decided(0.98, f"{12:064x}"),
        signer={"public_key": KEY},
    ),
    entry("other/unmeasured", 3),
    entry("local", 4, note=HOSTILE),
    {
        "model": "old/latent", "recipe": "oscar-v1", "format": "latent", "files": {},
        "note": "a note", "copies": [{"hub": "modelscope", "repo": "makers/zoo", "path": ""}],
    },
]  # fmt: skip
ENTRIES[1]["files"]["report.html"] = {"size": 10**6, "sha256": "0" * 64}


@pytest.fixture
def table(monkeypatch):
    """The Space's module of the table, whose name is as short as those of others may be."""
    monkeypatch.syspath_prepend(SPACE)
    yield importlib.import_module("zoo_table")
    del sys.modules["zoo_table"]


def render(table, entries: list[dict], origin="it", place=()) -> str:
    """The Space's first page, where nobody is signed in."""
    loaded = LoadedIndex(index.Index.model_validate({"entries": entries}), origin)
    rows = [table.make_row(loaded, each, [*place]) for each in loaded.content.entries]
    usual = {"model": "", "gpu": "", "context": 0}
    visitor = {"user": None, "can_sign_in": False, "gpus": [], "contexts": [], "usual": usual}
    values = {**visitor, **table.table_values(rows), "origin": origin}
    scripts, folders = (SPACE / "zoo.js",), (SPACE / "templates",)
    return render_page("home.html.jinja", scripts, folders, **values)


@pytest.fixture
def page_file(table, tmp_path):
    """The page of all entries."""
    (tmp_path / "zoo.html").write_text(render(table, ENTRIES, place=["--index", "index.json"]))
    return tmp_path / "zoo.html"


def shown(page) -> list[str]:
    """The models of the visible entries, from top to bottom."""
    return page.locator("#zoo tbody:visible tr:first-child th").all_inner_texts()


def test_the_page_says_what_the_index_says(page_file, browser):
    page = browser.open_page(page_file)
    models = ["local", "old/latent", "other/unmeasured", "some/Large-8B", "some/Small-1B"]
    assert shown(page) == models
    cells = page.locator("#zoo tbody").nth(3).locator("tr").first.locator("td").all_inner_texts()
    assert cells == ["oscar", "90% (87% to 92%)", "+2.10%", "2.53", "2.0 MB", "2026-11-20"]
    cells = page.locator("#zoo tbody").nth(2).locator("tr").first.locator("td").all_inner_texts()
    assert cells == ["oscar", "-", "-", "-", "6.0 MB", "-"]
    assert "me@example.org" in page.locator("#zoo tbody").nth(3).inner_text()
    assert "not signed" in page.locator("#zoo tbody").nth(2).inner_text()
    assert "listed, but not pulled" in page.locator("#zoo tbody").nth(1).inner_text()


def test_columns_that_are_empty_are_left_out(table):
    text = render(table, [entry("some/Bare-1B", 1), entry("some/Bare-2B", 2)])
    assert re.findall(r"<dt>(.*?)</dt>", text) == ["Size"]
    assert "was published and not measured" in text
    text = render(table, [])
    assert "not measured" not in text
    assert "<dt>" not in text


def test_search_and_sort_by_keyboard(page_file, browser):
    page = browser.open_page(page_file)
    page.get_by_role("searchbox").focus()
    page.keyboard.type("some LARGE")
    assert shown(page) == ["some/Large-8B"]
    assert page.get_by_role("status").inner_text() == "1 of 5 shown"
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    assert len(shown(page)) == 5
    measured, others = ["some/Small-1B", "some/Large-8B"], ["local", "old/latent"]
    for title, best_first in (
        ("Answers", measured),
        ("Cost", measured),
        ("Bits", measured),
        ("Date", measured[::-1]),
    ):
        header = page.get_by_role("columnheader", name=title)
        header.get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert shown(page)[:2] == best_first, title
        first = header.get_attribute("aria-sort")
        page.keyboard.press("Enter")
        assert shown(page)[:2] == best_first[::-1], "what was not measured stays below"
        assert set(shown(page)[2:]) == {*others, "other/unmeasured"}
        assert {first, header.get_attribute("aria-sort")} == {"ascending", "descending"}
    page.get_by_role("columnheader", name="Size").get_by_role("button").press("Enter")
    assert shown(page) == [
        "some/Large-8B", "other/unmeasured", "local", "some/Small-1B", "old/latent"
    ], "by number, not by digits"  # fmt: skip


def test_commands_are_copied_and_links_lead_to_the_hubs(page_file, browser):
    page = browser.open_page(page_file)
    entry = page.locator("#zoo tbody").nth(4)
    command = entry.locator("code").inner_text()
    assert command == "rotationzoo pull some/Small-1B --recipe oscar --index index.json"
    button = entry.get_by_role("button")
    button.press("Enter")
    page.wait_for_function("document.activeElement.textContent != 'Copy'")
    if button.inner_text() == "Selected":
        assert page.evaluate("getSelection().toString()").strip() == command
    addresses = page.locator("#zoo a").evaluate_all("all => all.map(a => a.href)")
    assert {
        "https://huggingface.co/some/Small-1B",
        "https://huggingface.co/my/zoo/blob/main/folder/12/README.md",
        "https://huggingface.co/my/zoo/resolve/main/folder/12/report.html",
        "https://modelscope.cn/models/makers/zoo",
    } <= set(addresses)
    assert not [address for address in addresses if "folder/1/report" in address]


def test_a_command_fetches_the_entry_that_it_stands_beside(table):
    first = entry("a/b", 1, model_revision="1" * 40, created="2026-11-01")
    others = [
        entry("a/b", 2, model_revision="2" * 40, created="2026-11-02"),
        entry("a/b", 3, model_revision="2" * 40, rope_scaling="yarn:4"),
        entry("a/b", 4, recipe="best"),
    ]
    content = index.Index.model_validate({"entries": [first, *others]})
    loaded = LoadedIndex(content, "it")
    for listed in content.entries:
        _, _, model, *words = table.pull_command(loaded, listed, []).split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        asked = [options.get(name) for name in ("--revision", "--recipe")]
        scaling = options.get("--rope-scaling")
        chosen, _, _ = choose_entry(loaded, model, *asked, ["huggingface"], scaling)
        assert chosen == listed


@pytest.mark.hostile("markup")
def test_nothing_of_an_index_becomes_markup_or_another_address(table):
    hostile = entry("local", note=HOSTILE, signer={"identity": HOSTILE, "issuer": HOSTILE})
    hostile["copies"][0] |= {"path": "größe/+", "revision": "zweig+1"}
    with pytest.raises(ValueError, match="is not a path inside a folder"):
        index.Index.model_validate({"entries": [hostile]})
    hostile["copies"][0]["path"] = "größe/a+"
    content = index.Index.model_validate({"entries": [hostile]})
    loaded = LoadedIndex(content, HOSTILE)
    text = render(table, [hostile], HOSTILE, ["--repo", "$(id)/x"])
    assert text.count("&lt;img src=x") == 4, "of the note, the signer, its issuer and the origin"
    assert "<img" not in text
    links = table.copy_links(loaded, content.entries[0], content.entries[0].copies[0])
    place = "zweig%2B1/gr%C3%B6%C3%9Fe/a%2B/README.md"
    assert links == {"card": f"https://huggingface.co/my/zoo/blob/{place}"}
    assert "&#39;$(id)/x&#39;" in text, "quoted for a shell, then for the page"
