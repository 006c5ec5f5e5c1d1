"""A page in chromium: what a click, the mouse and the keyboard show; nothing is asked of a network."""

import shutil

import pytest

from moa_fairseq.cli import main

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.slow,
]
HOSTILE = ["w1 </script><b>w2 &amp; w3", "\u202ew4 w5\u202c w6", "שלום w7 w8"]


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(moa_run, dense_run, toy_data, tmp_path_factory):
    """Two runs; lines of a stranger."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "lines").write_text("\n".join(HOSTILE), encoding="utf-8")
    words = {"two": (moa_run, dense_run), "hostile": (moa_run, "--input", folder / "lines")}
    for name, runs in words.items():
        line = ("look", *runs, "--data", toy_data, "--cpu", "--output", folder / f"{name}.html")
        assert main([*map(str, line)]) == 0
    return folder


@pytest.fixture
def opened(chromium, pages):
    """opened(name, **settings) → the page, offline; the test fails on any message, error or request."""
    trouble = []
    contexts = []

    def open_page(name, **settings):
        context = chromium.new_context(**settings)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        url = (pages / f"{name}.html").as_uri()
        page.on("request", lambda request: request.url == url or trouble.append(request.url))
        page.set_default_timeout(60_000)  # a busy machine draws slowly
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def data_of(page):
    return page.evaluate("JSON.parse(document.getElementById('data').textContent)")


def test_a_token_shows_its_experts_and_their_keys(opened):
    page = opened("two")
    data = data_of(page)
    token = page.locator("#list .tokens[data-side=source] .token").nth(1)
    (sentence, _) = data["sentences"][0]
    route = sentence["routes"][0]
    width = data["runs"][0]["routers"][0]["per_token"]
    experts, gates = (route[key][width : 2 * width] for key in "eg")
    assert token.locator("sub").inner_text() == str(experts[0])
    assert f"expert {experts[0]}" in token.get_attribute("aria-label")
    token.hover()
    panel = page.locator("#panel")
    assert panel.locator(".swatch").all_inner_texts() == [str(expert) for expert in experts]
    assert panel.locator(".meter > span").all_inner_texts() == [
        f"{gate / 1000:.3f}" for gate in gates
    ]
    first = route["k"][width * 6 : width * 6 + 2]
    strongest = panel.locator(".chips").first.locator("li").first
    assert strongest.locator("small").inner_text() == f"{first[1] / 1000:.3f}"
    page.mouse.move(1, 1)
    assert panel.locator(".swatch").count() == 0
    token.click()
    page.mouse.move(1, 1)
    assert panel.locator(".swatch").count() == width
    assert (
        page.locator(".token[aria-pressed=true]").count() == 1
        and page.locator(".token.key").count()
    )
    page.keyboard.press("Escape")
    assert page.locator(".token[aria-pressed=true]").count() == 0


def test_an_expert_shows_its_tokens_and_its_load(opened):
    page = opened("two")
    router = data_of(page)["runs"][0]["routers"][0]
    button = page.locator("#legend .expert").nth(2)
    load = router["load"]["load"][2]
    assert f"{100 * load:.1f} %" in button.inner_text()
    button.click()
    assert page.locator("#legend [aria-pressed=true]").get_attribute("data-expert") == "2"
    assert page.locator(".token[data-expert='2'].dim").count() == 0
    assert (
        page.locator(".token.dim").count()
        == page.locator(".token[data-expert]:not([data-expert='2'])").count()
    )
    texts = page.locator("#panel").inner_text()
    assert f"{100 * load:.1f} % of choices" in texts
    assert f"{100 * router['load']['gate_share'][2]:.1f} % of weight" in texts
    cells = page.locator("#loads tbody tr").nth(0).locator("td").all_inner_texts()
    assert f"{100 * router['load']['evenness']:.1f} %" in cells


def test_layers_order_and_text_choose_what_is_shown(opened):
    page = opened("two")
    data = data_of(page)
    page.locator("[name=kind]").select_option("decoder cross-attention")
    route = data["sentences"][0][0]["routes"][2]["e"]
    row = page.locator("#list .tokens[data-side=target][data-run='0']").first
    assert row.locator(".token").nth(1).locator("sub").inner_text() == str(
        route[data["runs"][0]["routers"][2]["per_token"]]
    )
    page.locator("[name=order]").select_option("score 0")
    for run in (0, 1):
        page.locator("[name=order]").select_option(f"score {run}")
        scores = [sentence[run]["score"] for sentence in data["sentences"]]
        worst = data["sentences"][scores.index(min(scores))][run]["number"]
        assert page.locator("#list .top b").first.inner_text() == str(worst)
        card = page.locator("#glance dl > div", has_text="Worst").nth(run).inner_text()
        assert f"number {worst}" in card and f"{min(scores):.1f}" in card
    word = data["sentences"][3][0]["source"][0]
    page.locator("[name=text]").fill(word)
    shown = page.locator("#list > li").count()
    assert 0 < shown < 12
    assert all(word in text for text in page.locator("#list > li").all_inner_texts())
    page.locator("[name=colour]").select_option("bits")
    bits = data["sentences"][0][0]["bits"][1]
    page.locator("[name=text]").fill("")
    page.locator("[name=order]").select_option("place")
    assert row.locator(".token").nth(1).locator("sub").inner_text() == f"{bits:.1f}"


def test_a_mark_counts_once_in_a_sentence(opened):
    page = opened("two")
    shares = """() => {
      const router = routersOf(0)[1];
      const [k, target] = [router.per_token, [",", ",", ",", "."]];
      const e = [3, 3, 1, 2].flatMap((first) => [first, ...Array(k - 1).fill(0)]);
      page.sentences = [[{ target, target_glue: "0000", routes: [null, { e }, null] }]];
      return Object.fromEntries(takes(0, router, 0).punctuation);
    }"""
    assert page.evaluate(shares) == {
        "1": pytest.approx(1 / 3),
        "2": 1,
        "3": pytest.approx(2 / 3),
    }


def test_the_worst_sentence_is_not_behind_the_experts(opened):
    page = opened("two", reduced_motion="reduce", viewport={"width": 900, "height": 500})
    page.locator("#glance dl > div", has_text="Worst").nth(1).locator("button").click()
    heading = page.locator("#list > li").first.bounding_box()["y"]
    legend = page.locator("#legend").bounding_box()
    assert legend["y"] + legend["height"] <= heading < 500


def test_axes_have_round_numbers(opened):
    page = opened("two")
    assert page.evaluate("ticks(33, 12000, true)") == [100, 1000, 10000]
    assert page.evaluate("ticks(0, 1040, false)") == [0, 500, 1000]
    assert page.evaluate("ticks(6.1, 14.9, false)") == [8, 10, 12, 14]


def test_a_tap_shows_a_token_above_the_sheet_and_another_lets_it_go(opened):
    touch = {"has_touch": True, "is_mobile": True, "reduced_motion": "reduce"}
    page = opened("two", viewport={"width": 400, "height": 800}, **touch)
    token = page.locator("#list .tokens[data-side=target] .token").nth(8)
    place = "document.querySelectorAll('#list .tokens[data-side=target] .token')[8].getBoundingClientRect()"
    page.evaluate(f"scrollBy(0, {place}.top - 720)")
    panel = page.locator("#panel")
    token.tap()
    assert page.evaluate(f"{place}.bottom") <= panel.bounding_box()["y"]
    token.tap()
    assert not panel.is_visible()
    token.tap()
    page.get_by_role("button", name="Close").tap()
    assert (
        not panel.is_visible() and page.evaluate("document.documentElement.scrollWidth") <= 400
    )


def test_the_keyboard_reaches_every_token(opened):
    page = opened("two")
    row = page.locator("#list .tokens").first
    row.locator(".token").first.focus()
    for key, place in (("ArrowRight", 1), ("End", -1), ("Home", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        last = row.locator(".token").count() - 1
        focused = page.evaluate("document.activeElement.dataset.place")
        assert focused == str(last if place < 0 else place)
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.parentElement.dataset.side") == "target"
    page.keyboard.press("Enter")
    assert page.locator(".token[aria-pressed=true]").count() == 1
    page.locator("#legend .expert").nth(2).press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("#legend [aria-pressed=true]").count() == 0
    assert page.evaluate("document.activeElement.dataset.expert") == "2"
    tabbable = page.locator("#list .tokens").first.locator(".token[tabindex='0']").count()
    assert tabbable == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_page_is_no_wider_than_the_screen(opened, scheme):
    page = opened("two", viewport={"width": 400, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.locator("#list .token").nth(1).click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(ground.removeprefix("rgb(").split(",")[0]) > 128) == (scheme == "light")
    unnamed = "[...document.querySelectorAll('button,select,input')].filter(each => !each.labels?.length && "
    unnamed += "!each.textContent.trim() && !each.getAttribute('aria-label')).length"
    assert page.evaluate(unnamed) == 0


def test_hostile_text_is_shown_as_it_is(opened):
    page = opened("hostile")
    rows = page.locator("#list .tokens[data-side=source]")
    shown = [
        " ".join(row.locator(".token").evaluate_all("all => all.map(e => e.firstChild.data)"))
        for row in rows.all()
    ]
    assert "</script><b>w2 &amp; w3" in shown[0] or "<unk>" in shown[0]
    assert page.locator("#list b b, #list script").count() == 0
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.token')).unicodeBidi")
        == "isolate"
    )
    page.emulate_media(media="print")
    assert not page.locator("#controls").is_visible() and rows.first.is_visible()
