"""The documentation in a browser: nothing comes from elsewhere, everything fits and can be read."""

import pytest

from tests.browser import browsing

pytest.importorskip("playwright", reason="an extra: functional_te[browser]")
pytest.importorskip("mkdocs", reason="an extra: functional_te[docs]")
if browsing.chromium() is None:
    pytest.skip("needs a Chromium", allow_module_level=True)

pytestmark = pytest.mark.slow

PAGES = (
    "index.html",
    "quickstart.html",
    "concepts.html",
    "graph.html",
    "distributed.html",
    "recipes.html",
    "operations.html",
    "backends.html",
    "performance.html",
    "contributing.html",
    "notebooks/01_first_chain.html",
    "notebooks/03_recipes.html",
    "api/functional_te.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with browsing.served(browsing.built_site(tmp_path_factory.mktemp("site"))) as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browsing.browser() as running:
        yield running


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read(site, chromium, scheme, width):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda response: response.status < 400 or errors.append(f"{response.status} {response.url}"))
    found = {}
    for name in PAGES:
        page.goto(f"{site}/{name}")
        found[name] = browsing.wrong(page, "article")
    page.close()
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert [url for url in requests if not url.startswith((site, "data:"))] == []
    assert errors == []


def test_drawings_follow_the_theme_of_the_page(site, chromium):
    page = chromium.new_page(color_scheme="light")
    page.goto(f"{site}/index.html")
    fill = "getComputedStyle(document.querySelector('.drawing .fte-page')).fill"
    assert page.evaluate(fill) == "rgb(255, 255, 255)"
    page.click("label[for=__palette_1]")
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert page.evaluate(fill) == "rgb(13, 17, 23)"
    page.close()


def test_search_finds_a_function(site, chromium):
    page = chromium.new_page()
    page.goto(f"{site}/index.html")
    page.fill("[data-md-component=search-query]", "update_state")
    page.wait_for_selector(".md-search-result__item")
    assert "update_state" in page.inner_text(".md-search-result__list")
    page.close()
