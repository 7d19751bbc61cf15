#!/usr/bin/env python3
"""Use docs/explore.html in a headless Chromium as a visitor would, and say what was seen.

    python3 scripts/explore_browser.py [--screenshots DIR]

Exit status 0: everything was as it should be, or there is no Chromium (a line says so). Times are printed, and never a reason to fail.
Needs Python's standard library and chromium.
"""
import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

PAGE = "file://" + os.path.abspath("docs/explore.html")
PATIENCE = 60  # seconds for one answer, on a busy machine


class Browser:
    """A page of a headless Chromium, by the DevTools protocol: JSON over a WebSocket."""

    def __init__(self, binary, directory):
        self.process = subprocess.Popen([binary, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={directory}",
                                         "--window-size=1280,900", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file, until = os.path.join(directory, "DevToolsActivePort"), time.time() + PATIENCE
        while not os.path.exists(port_file) or not open(port_file).read().strip():
            if time.time() > until or self.process.poll() is not None:
                raise SystemExit("explore_browser.py: chromium does not start")
            time.sleep(0.05)
        port = int(open(port_file).read().split()[0])
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        path = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page").split(str(port), 1)[1]
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        while b"\r\n\r\n" not in self.bytes(1, peek=True):
            time.sleep(0.01)
        self.bytes(self.peeked.index(b"\r\n\r\n") + 4)
        self.number, self.errors = 0, []
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    peeked = b""

    def bytes(self, n, peek=False):
        while len(self.peeked) < n or peek:
            more = self.socket.recv(1 << 16)
            if not more:
                raise SystemExit("explore_browser.py: chromium has gone")
            self.peeked += more
            if peek:
                return self.peeked
        taken, self.peeked = self.peeked[:n], self.peeked[n:]
        return taken

    def receive(self):
        text = b""
        while True:
            first, length = self.bytes(2)
            length &= 127
            if length == 126:
                length, = struct.unpack(">H", self.bytes(2))
            elif length == 127:
                length, = struct.unpack(">Q", self.bytes(8))
            text += self.bytes(length)
            if first & 128:
                return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        text = json.dumps({"id": self.number, "method": method, "params": params}).encode()
        mask, n = os.urandom(4), len(text)
        size = struct.pack(">BBH", 0x81, 254, n) if n < 65536 else struct.pack(">BBQ", 0x81, 255, n)
        if n < 126:
            size = struct.pack(">BB", 0x81, 128 | n)
        self.socket.sendall(size + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(text)))
        while True:
            message = self.receive()
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == self.number:
                return message.get("result", {})

    def js(self, expression):
        return self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)["result"].get("value")

    def wait(self, expression):
        until = time.time() + PATIENCE
        while not self.js(expression):
            if time.time() > until:
                raise SystemExit(f"explore_browser.py: not within {PATIENCE} s: {expression}; errors: {self.errors}")
            time.sleep(0.02)

    def open(self, address):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=PAGE + address)
        began = time.time()
        self.wait("document.readyState === 'complete' && typeof answer === 'function' && document.getElementById('answer').getAttribute('aria-busy') === 'false'")
        return time.time() - began

    def set(self, name, value):
        """As an input of the visitor's; waits for the answer. Seconds that it took."""
        began = time.time()
        self.js(f"at('answer').setAttribute('aria-busy', 'true'); at('{name}').type === 'checkbox' ? at('{name}').checked = {json.dumps(value)} : "
                f"at('{name}').value = {json.dumps(value)}; at('{name}').dispatchEvent(new Event('input', {{bubbles: true}})); "
                f"at('{name}').dispatchEvent(new Event('change', {{bubbles: true}}))")
        self.wait("at('answer').getAttribute('aria-busy') === 'false'")
        return time.time() - began

    def throughput(self):
        return float(self.js("at('figures').querySelector('b').textContent.replace(/,/g, '')"))

    def picture(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        with open(path, "wb") as f:
            f.write(base64.b64decode(shot["data"]))

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)


failures = 0


def expect(what, is_so, seen=""):
    global failures
    print(f"{'ok  ' if is_so else 'FAIL'} {what}{f': {seen}' if seen != '' else ''}")
    failures += not is_so


def visit(b, pictures):
    first = b.open("#model=opt-30b")
    expect("the first answer is the program's for OPT-30B on the T4", abs(b.throughput() - 17.46) < .01, b.throughput())
    b.wait("run && run.squares.length > 100")
    if pictures:
        b.size(1280, 2600), b.picture(os.path.join(pictures, "wide.png"))
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        b.picture(os.path.join(pictures, "dark.png"))
        b.call("Emulation.setEmulatedMedia", features=[])
    before = b.throughput()
    b.set("ctog_bdw", "4")
    expect("a faster link brings more", b.throughput() > 1.05 * before, b.throughput())
    address = b.js("location.hash")
    expect("the address says what was asked", "ctog_bdw=4" in address and "--with ctog_bdw=24000000000" in b.js("at('command').textContent"), address)
    there = b.throughput()
    b.open(address)
    expect("the address restores the view", b.throughput() == there and b.js("at('ctog_bdw').value") == "4", b.throughput())
    b.set("ctog_bdw", "0"), b.set("hand", True)
    b.set("wg", "100"), b.set("wc", "0")
    refusal = b.js("at('refused').hidden ? '' : at('refused').textContent")
    expect("what does not fit is refused in the program's words", "the GPU tier needs" in refusal, refusal)
    b.js("at('take').click()"), b.wait("at('refused').hidden && at('answer').getAttribute('aria-busy') === 'false'")
    expect("the best, taken by hand, is as good", abs(b.throughput() / before - 1) < .02, b.throughput())
    b.set("hand", False), b.set("s", "3000")
    refusal = b.js("at('refused').hidden ? '' : at('refused').textContent")
    expect("a prompt beyond 2048 is refused in the program's words", "2048 positions" in refusal, refusal)
    b.set("s", "512"), b.set("frontier", True)
    b.wait("document.querySelectorAll('#plot polyline').length === 2")
    expect("Figure 1 has both lines", True)
    b.js("at('ctog_bdw').focus()")
    for kind in ("keyDown", "keyUp"):
        b.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    expect("an arrow key moves a slider", b.js("at('ctog_bdw').value") == "1")
    b.size(360, 740)
    b.open("#model=opt-1.3b")
    expect("360 px have no sideways scroll", b.js("document.documentElement.scrollWidth") <= 360, b.js("document.documentElement.scrollWidth"))
    if pictures:
        b.wait("run"), b.size(360, 4200), b.picture(os.path.join(pictures, "narrow.png"))
    b.size(1280, 900)
    large = b.open("#model=opt-175b")
    expect("no error on the console", not b.errors, "; ".join(b.errors))
    slid = sorted(b.set("cmem", str(n)) for n in (1, -1, 2))[1]
    print(f"first answer {first:.2f} s (OPT-30B), {large:.2f} s (OPT-175B); after a slider {slid:.2f} s (OPT-175B, median of three)")


def main():
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not binary:
        return print("explore_browser.py: skipped: no chromium")
    pictures = sys.argv[sys.argv.index("--screenshots") + 1] if "--screenshots" in sys.argv else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        browser = Browser(binary, directory)
        try:
            visit(browser, pictures)
        finally:
            browser.process.terminate(), browser.process.wait()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
