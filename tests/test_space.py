"""The Space of `scripts/space`, as it runs: its pages in a browser, its plans, and its requests."""

import hashlib
import importlib
import json
import sys
from http.cookies import SimpleCookie
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from support.browser import scrolls_sideways, serious_findings
from support.places import ROOT
from support.published import ok
from support.reports import OF_ARTIFACT, decided, make_evaluation
from support.space import OWNERS_TOKEN, ZOO, publish_model, running_space

from rotationzoo.network import tokens

pytestmark = pytest.mark.thorough

Request = pytest.importorskip("starlette.requests", reason="it is in the extra `dev`").Request
pytest.importorskip("uvicorn", reason="it is in the extra `dev`")

MODEL = "someone/Model-8B"
LISTED, OLDER, CHANGED = "a" * 64, "b" * 64, "c" * 64  # the sha256 of what the zoo lists
EVALUATION, UNASKED = (
    json.loads(json.dumps(make_evaluation()).replace(OF_ARTIFACT, identity))
    for identity in (LISTED, OLDER)
)
for scores in (UNASKED["exact"], *UNASKED["windows"][0]["arms"].values()):
    scores["all_tasks"] = None


def entry(folder: str, sha256: str, evaluation: bytes) -> dict:
    """What the index says of rotations with this sha256."""
    listed = {"size": len(evaluation), "sha256": hashlib.sha256(evaluation).hexdigest()}
    files = {"rotations.safetensors": {"size": 3, "sha256": sha256}, "evaluation.json": listed}
    return {
        "model": MODEL, "recipe": f"oscar-{folder}", "files": files,
        "copies": [{"hub": "huggingface", "repo": ZOO, "path": folder}],
        "evaluation": decided(0.9, sha256),
    }  # fmt: skip


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """The Space on a hub with a model and a zoo."""
    with running_space(tmp_path_factory.mktemp("space") / "log") as running:
        publish_model(running.hub, MODEL)
        running.hub.create(ZOO)
        newer, older = (json.dumps(each).encode() for each in (EVALUATION, UNASKED))
        entries = [
            entry("a", LISTED, newer), entry("b", OLDER, older),
            entry("c", CHANGED, b"another file"),
        ]  # fmt: skip
        files = {"zoo_index.json": json.dumps({"schema": 1, "entries": entries}).encode()}
        for folder, evaluation in (("a", newer), ("b", older), ("c", older)):
            files[f"{folder}/evaluation.json"] = evaluation
        running.hub.commit(ZOO, files)
        yield running


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_in_a_browser(space, browser, width, scheme):
    page = browser.open_page(space.address, width, scheme)
    assert page.locator("#zoo tbody").count() == 3
    assert "90% (87% to 92%)" in page.locator("#zoo").inner_text()
    assert not serious_findings(page)
    assert not scrolls_sideways(page)
    # By keyboard alone, from the field to the plan.
    page.get_by_label("Model on Hugging Face").focus()
    page.keyboard.type(MODEL)
    page.keyboard.press("Tab")
    page.keyboard.type("H200")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=A cache for")
    assert not serious_findings(page)
    assert not scrolls_sideways(page)


def test_a_plan_is_that_of_the_command(space, browser, inside):
    page = browser.open_page(f"{space.address}/plan?model={MODEL}&gpu=L40S&context=32768")
    # The command reads the same config from a folder.
    folder = inside.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(space.hub.files(MODEL)["config.json"])
    plan = ok(inside("plan", "model", "--gpu", "L40S", "--context", "32768", "--json"))
    rows = page.locator("table").first.locator("tbody tr")
    for row, cache in zip(rows.all(), ("bf16", "fp8", "int2"), strict=True):
        fitting = plan["gpu"]["weights"]["published"]
        assert row.locator("th, td").all_inner_texts() == [
            cache,
            f"{plan['kv_bytes_per_token'][cache]:,.0f}",
            f"{plan['kv_bytes_per_request'][cache] / 1e9:,.2f} GB",
            f"{fitting['max_context'][cache]:,}",
            f"{fitting['max_requests'][cache]:,}",
        ]
    assert plan["answer"] in page.locator("main").inner_text()


@pytest.mark.parametrize("width", [390, 1440])
def test_answers_and_costs_of_an_entry(space, browser, width):
    scheme = {390: "dark", 1440: "light"}[width]
    page = browser.open_page(space.address, width, scheme)
    page.get_by_role("link", name="answers and costs of someone/Model-8B, oscar-a").press("Enter")
    page.wait_for_selector("figure svg")
    window = EVALUATION["windows"][0]
    asked = window["arms"]["made"]["all_tasks"]
    words = f"made: {asked['answered'] / asked['questions']:.0%} at 2.53 bits of an element"
    assert words in page.locator("figure").aria_snapshot()
    assert window["verdict"]["words"][0] in page.locator("main").inner_text()
    assert page.get_by_role("table", name="cost").is_visible()
    assert not serious_findings(page)
    assert not scrolls_sideways(page)


def test_an_evaluation_that_says_less_or_was_changed(space):
    status, _, text = space.ask(f"/answers/{OLDER}")
    assert (status, "<figure" in text, 'id="measured"' in text) == (200, False, True)
    status, _, text = space.ask(f"/answers/{CHANGED}")
    assert (status, "is not the one that the zoo lists" in text) == (400, True)
    status, _, text = space.ask("/answers/" + "d" * 64)
    assert (status, "the zoo lists no such rotations" in text) == (400, True)


@pytest.mark.hostile("path")
@pytest.mark.parametrize(
    "model",
    ["demo", ".", "../..", "/etc/passwd", "~root/x", "a/b/c", "--help/x", "-q/x", "a/..", "a/b c",
     "file:///etc/passwd", "<script>/x", "https://huggingface.co.evil.example/a/b", "a/b" * 99],
)  # fmt: skip
def test_only_a_model_of_the_hub_is_planned_or_asked_for(space, model):
    before = len(space.hub.requests)
    for path in (
        f"/plan?{urlencode(asked)}" for asked in ({"model": model}, {"model": MODEL, "gpu": model})
    ):
        status, _, text = space.ask(path)
        assert status == 400
        assert "<script>" not in text.split("<main")[1].split("</main>")[0]
    assert len(space.hub.requests) == before, "no hub was asked"


def test_what_cannot_be_planned_is_said_in_a_sentence(space):
    status, _, text = space.ask("/plan?model=someone/nothing")
    assert status == 400
    assert "there is no model someone/nothing on the hub" in text
    publish_model(
        space.hub, "someone/latent", model_type="deepseek_v3", kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64,
        num_key_value_heads=32,
    )  # fmt: skip
    status, _, text = space.ask("/plan?model=someone/latent")
    assert status == 200, text
    assert "rotationzoo calibrate someone/latent" in text


def test_a_visitor_signs_in_and_asks_for_rotations(space, browser, inside, monkeypatch):
    hub, form = space.hub, {"model": MODEL, "recipe": "oscar"}
    assert "Sign in first" in space.ask("/ask", form)[2]
    page = browser.open_page(space.address)
    page.goto(f"{space.address}/sign-in")
    # To sign in is to leave the page, for the hub and back.
    assert all("/oauth/authorize" in fault for fault in browser.faults), browser.faults
    browser.faults.clear()
    assert page.url == f"{space.address}/"
    assert "Signed in as tester" in page.locator("nav").inner_text()
    assert hub.asked_scopes == ["openid profile write-discussions"]
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Lax"
    assert hub.token not in cookie["value"] + page.content()

    page.goto(f"{space.address}/plan?model={MODEL}")
    page.get_by_label("Recipe").select_option("oscar")
    page.get_by_role("button", name="Open a pull request").press("Enter")
    page.wait_for_selector("text=The pull request is open")
    (pull,) = hub.repositories[ZOO].pulls
    assert pull.title == f"Asks for rotations of {MODEL}"
    assert page.locator("main a").get_attribute("href") == f"{hub.endpoint}/{ZOO}/discussions/1"
    before, after = hub.files(ZOO), hub.files(ZOO, pull.ref)
    assert {path for path in after if before.get(path) != after[path]} == {
        "requests/someone__Model-8B.yaml"
    }
    assert not serious_findings(page)

    # What arrived is a recipe file that `regenerate` reads.
    (inside.folder / "requests").mkdir()
    content = after["requests/someone__Model-8B.yaml"]
    (inside.folder / "requests" / "model.yaml").write_bytes(content)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    (inside.folder / "index.json").write_text('{"schema": 1, "entries": []}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    planned = ok(
        inside("regenerate", "--plan", "--configs", "requests", "--index", "index.json", "--json")
    )
    assert [due["model"] for due in planned["models"]] == [MODEL]

    # A second request is the first one, also where it spells the name in another way.
    session = f"{cookie['name']}={cookie['value']}"
    hub.repositories[MODEL.lower()] = hub.repositories[MODEL]
    for name in (MODEL, MODEL.lower()):
        status, _, text = space.ask("/ask", {**form, "model": name}, session)
        assert (status, "Somebody has asked for this model" in text) == (200, True)
    assert len(hub.repositories[ZOO].pulls) == 1
    for wrong in ({"model": "../x", "recipe": "oscar"}, {"model": MODEL, "recipe": "../x"},
                  {"model": "someone/nothing", "recipe": "oscar"}, {}):  # fmt: skip
        assert space.ask("/ask", wrong, session)[0] == 400
    assert space.ask("/ask", {"model": "x" * 5000}, session)[0] == 400
    page.goto(space.address)
    page.get_by_role("button", name="Sign out").press("Enter")
    page.wait_for_selector("text=Sign in with Hugging Face")
    assert "Sign in first" in space.ask("/ask", form, session)[2], "the token is forgotten"
    assert OWNERS_TOKEN not in hub.credentials


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of the Space, whose names are as short as those of others may be."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "space")
    before = set(sys.modules)
    yield importlib.import_module
    own = {"planning", "settings", "sign_in", "zoo_entries", "zoo_table"}
    for name in own & sys.modules.keys() - before:
        del sys.modules[name]


def test_tokens_are_forgotten_and_nobody_on_the_way_crowds_out_a_visitor(modules, monkeypatch):
    sign_in = modules("sign_in")
    # Here the code of a visitor is the token as well as the name.
    monkeypatch.setattr(sign_in, "_name_of", str)
    monkeypatch.setattr(
        sign_in.Sessions, "_fetch_token", lambda self, code: tokens.check_token(code, "a test")
    )
    oauth = SimpleNamespace(client_id="x", scopes="openid", provider="https://hub.example")
    sessions = sign_in.Sessions(SimpleNamespace(address="https://space.example", oauth=oauth))

    def request(query="", **cookies):
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        headers = [(b"cookie", cookie.encode())]
        return Request({"type": "http", "headers": headers, "query_string": query.encode()})

    def enter(code, **cookies):
        state = sessions.start().headers["Location"].split("state=")[1]
        query = f"code={code}&state={state}"
        answer = sessions.finish(request(query, state=state, **cookies))
        session = SimpleCookie(answer.headers.getlist("set-cookie")[-1])["session"].value
        return request(session=session), {"session": session}

    monkeypatch.setattr(sign_in, "_MOST", 2)
    first, cookie = enter("hf_first")
    for _ in range(5):
        sessions.start()
    assert sessions.find(first).name == "hf_first"
    assert tokens.redact("hf_first") == "[token]"
    again, _ = enter("hf_again", **cookie)
    assert sessions.find(first) is None, "the same browser has signed in anew"
    enter("hf_second")
    enter("hf_third")
    assert sessions.find(again) is None, "the oldest of three"
    for code in ("hf_first", "hf_again"):
        assert tokens.redact(code) == code, "nothing remembers the token"
    last, _ = enter("hf_last")
    sessions.end(last)
    assert sessions.find(last) is None
    assert tokens.redact("hf_last") == "hf_last"


def test_a_code_for_another_visitor_signs_nobody_in(space):
    status, headers, _ = space.ask("/sign-in")
    assert status == 302
    cookie = headers["Set-Cookie"].split(";")[0]
    code = "0123456789abcdef"
    for answer in (f"code={code}&state=guessed", f"code={code}", "error=access_denied"):
        assert space.ask(f"/signed-in?{answer}", cookie=cookie)[0] == 400
    assert space.ask(f"/signed-in?code={code}&state=x")[0] == 400, "without a session"
    state = headers["Location"].split("state=")[1]
    status, _, text = space.ask(f"/signed-in?code={code}&state={state}", cookie=cookie)
    assert (status, "the hub has not signed you in" in text) == (400, True)
