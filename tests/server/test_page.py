"""The chat page in headless Chromium, by chromedriver's own protocol."""

import base64
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import LONG, Served

DRIVER = shutil.which("chromedriver")
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DRIVER is None, reason="needs chromium-driver")]


class Browser:
    """A session of chromedriver."""

    def __init__(self, port: int):
        self._port, self._path = port, ""
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": OPTIONS}}
        session = self.call("POST", "/session", capabilities={"alwaysMatch": wanted})
        self._path = f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, **body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        content = json.dumps(body) if method == "POST" else None
        with contextlib.closing(connection):
            connection.request(method, self._path + path, content)
            answer = json.loads(connection.getresponse().read())["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", script=f"return {script}", args=[])

    def type(self, element: str, text: str) -> None:
        found = self.call("POST", "/element", using="css selector", value=element)
        self.call("POST", f"/element/{next(iter(found.values()))}/value", text=text)

    def click(self, element: str) -> None:
        self.run(f"document.querySelector({element!r}).click()")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + 30
        while not self.run(condition):
            assert time.monotonic() < until, condition
            time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            line = next(line for line in driver.stdout if "started successfully on port" in line)
            started = Browser(int(line.split()[-1].rstrip(".")))
            yield started
            started.call("DELETE", "")
        finally:
            driver.terminate()


IDLE = "!document.querySelector('#send').hidden"


def test_chat(served: Served, browser: Browser):
    browser.call("POST", "/url", url=f"http://127.0.0.1:{served.port}/")
    browser.wait("document.querySelector('#model').textContent === 'small'")
    for name, value in {"temperature": "0", "max_tokens": "40"}.items():
        browser.run(f"document.querySelector('#{name}').value = {value!r}")
    browser.type("#input", LONG[:200] + "\ue007")  # the Enter key
    browser.wait(f"document.querySelector('#share').textContent && {IDLE}")
    answer = browser.run("document.querySelector('.assistant').textContent")
    assert answer == served.chat(LONG[:200], max_tokens=40).choices[0].message.content
    coloured = "[...document.querySelectorAll('#text span')].filter((s) => s.style.background)"
    assert browser.run(f"{coloured}.length") > 5
    assert browser.run("document.querySelector('#layer').length") == 1 + 1  # on the host
    assert "tokens/s" in browser.run("document.querySelector('#rates').textContent")
    if "SCREENSHOT" in os.environ:
        picture = base64.b64decode(browser.call("GET", "/screenshot"))
        Path(os.environ["SCREENSHOT"]).write_bytes(picture)


def test_stop_and_errors(served: Served, browser: Browser):
    browser.click("#new")
    browser.run("document.querySelector('#max_tokens').value = '100'")
    browser.type("#input", "Once\ue007")
    browser.wait("document.querySelector('.assistant')?.textContent.length > 3")
    browser.click("#stop")
    browser.wait(IDLE)
    served.wait(lambda: not served.metric("infinigen_running_answers"))
    browser.run("document.querySelector('#temperature').value = '-1'")
    browser.type("#input", "more\ue007")
    browser.wait("document.querySelector('.error')")
    assert "temperature" in browser.run("document.querySelector('.error').textContent")
