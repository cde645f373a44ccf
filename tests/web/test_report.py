"""The report and the widget in a real browser: the table's numbers, no network, no text taken for markup."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from manyheads.view.document import About, document
from manyheads.view.report import asset, compressed, report_html

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>&amp;\0"


def cells(page):
    found = page.query_selector_all(".heads [role=gridcell]")
    return {cell.get_attribute("data-head"): cell.get_attribute("data-value") for cell in found}


def test_every_number_on_the_page_is_the_tables(made, opened):
    page = opened(made.path)
    page.wait_for_selector(".heads [role=gridcell]")
    names = made.document["heads"]["name"]
    for metric in made.table.metrics:
        page.select_option("[data-control=metric]", metric)
        shown = cells(page)
        assert list(shown) == names
        for value, wanted in zip(shown.values(), made.table[metric].tolist(), strict=True):
            assert value is None if wanted != wanted else float(value) == wanted


def test_every_view_of_a_real_document_opens(made, opened):
    for fragment in ("", "#head/1.2"):
        page = opened(f"{made.path}{fragment}")
        page.wait_for_selector("[role=tab]")
        for tab in [tab.get_attribute("data-tab") for tab in page.query_selector_all("[role=tab]")]:
            page.click(f"[data-tab={tab}]")
            page.wait_for_timeout(50)
            assert page.query_selector("[role=alert]") is None, tab
        assert "a small BERT" in page.inner_text("h1")


@pytest.fixture
def served(made):
    """The address of a server with the report and a plain page, and what else it was asked for."""
    pages = {"/report": made.path.read_bytes(), "/plain": b"<!doctype html><title>plain</title><p>plain"}
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in pages:
                asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_the_policy_stops_every_request(browser, served):
    """Even a script that somebody smuggled in would reach nobody, not so much as its own server."""
    address, asked = served
    context = browser.new_context()
    page = context.new_page()

    def tries():
        script = "Object.assign(document.createElement('script'), {textContent: 'window.taken = 1'})"
        page.evaluate(f"document.body.append({script})")
        page.evaluate("document.body.append(Object.assign(new Image(), {src: '/picture'}))")
        sent = page.evaluate("fetch('/data').then(() => true, () => false)")
        page.wait_for_timeout(200)
        return page.evaluate("window.taken === 1"), sent, sorted({"/picture", "/data"} & set(asked))

    page.goto(f"{address}/report")
    page.wait_for_selector("[role=tab]")
    assert tries() == (False, False, [])
    page.goto(f"{address}/plain")  # where there is no policy, all of it works
    assert tries() == (True, True, ["/data", "/picture"])
    context.close()


def test_hostile_names_are_text(made, opened, tmp_path):
    hostile = document(
        made.table, about=About(HOSTILE, HOSTILE, notes=[HOSTILE], groups={"special": HOSTILE})
    )
    path = tmp_path / "report.html"
    path.write_text(report_html(hostile), encoding="utf-8")
    page = opened(path)
    page.wait_for_selector("[role=tab]")
    assert "onerror" in page.inner_text("h1")
    assert page.query_selector("img[src=x]") is None
    assert not page.title().startswith("taken")


def test_the_widget_shows_a_table_and_tells_what_is_picked(made, opened, tmp_path):
    """anywidget's part is played by a small model: get, set, save_changes, on, off."""
    module = base64.b64encode(asset("widget.js").encode()).decode()
    data = base64.b64encode(compressed(made.document)).decode()
    path = tmp_path / "widget.html"
    path.write_text(
        f"""<!doctype html><meta charset="utf-8"><style>{asset("page.css")}</style><div id="here"></div>
        <script type="module">
        const bytes = Uint8Array.from(atob("{data}"), (c) => c.charCodeAt(0));
        const longer = new Uint8Array(bytes.length + 3);
        longer.set(bytes, 3);
        const values = {{document: new DataView(longer.buffer, 3), picked: [2]}};
        const listeners = [];
        window.saved = 0;
        window.model = {{
          get: (name) => values[name],
          set: (name, value) => {{ values[name] = value; }},
          save_changes: () => {{ window.saved += 1; }},
          on: (event, listener) => listeners.push([event, listener]),
          off: (event, listener) => listeners.splice(listeners.findIndex((one) => one[1] === listener), 1),
        }};
        window.python = (picked) => {{
          values.picked = picked;
          for (const [event, listener] of listeners) listener();
        }};
        window.listeners = listeners;
        const widget = (await import("data:text/javascript;base64,{module}")).default;
        window.end = await widget.render({{model, el: document.getElementById("here")}});
        </script>""",
        encoding="utf-8",
    )
    page = opened(path)
    page.wait_for_selector(".heads [role=gridcell]")
    entropy = made.table["entropy"].tolist()
    assert [float(value) for value in cells(page).values()] == entropy
    names = made.document["heads"]["name"]

    def picked():
        return page.evaluate("model.get('picked')")

    assert picked() == [2]  # what Python had picked before
    page.click(f"[data-head='{names[5]}']")
    assert picked() == [5]
    assert page.evaluate("saved") >= 1
    page.evaluate("python([7])")
    assert page.get_attribute(f"[data-head='{names[7]}']", "aria-selected") == "true"
    page.evaluate("end()")
    assert page.evaluate("listeners.length") == 0
    assert json.loads(page.evaluate("JSON.stringify(model.get('picked'))")) == [7]
