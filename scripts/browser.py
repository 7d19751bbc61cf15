"""A page in a headless Chromium, by the DevTools protocol, for the scripts that look at pages as a visitor does.

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

PATIENCE = 60  # seconds for one answer, on a busy machine
KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}  # their numbers; a letter's is that of the capital


class Browser:
    """A page of a headless Chromium, by the DevTools protocol: JSON over a WebSocket."""

    def __init__(self, binary, directory):
        self.process = subprocess.Popen([binary, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={directory}",
                                         "--window-size=1280,900", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file, until = os.path.join(directory, "DevToolsActivePort"), time.time() + PATIENCE
        while not os.path.exists(port_file) or not open(port_file).read().strip():
            if time.time() > until or self.process.poll() is not None:
                raise SystemExit("browser.py: chromium does not start")
            time.sleep(0.05)
        port = int(open(port_file).read().split()[0])
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        path = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page").split(str(port), 1)[1]
        self.socket = socket.create_connection(("127.0.0.1", port), 2 * PATIENCE)
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
                raise SystemExit("browser.py: chromium has gone")
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
                raise SystemExit(f"browser.py: not within {PATIENCE} s: {expression}; errors: {self.errors}")
            time.sleep(0.02)

    def open(self, address, ready="true"):
        """Opens a page anew, and waits until it is there and ready."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href !== 'about:blank' && ({ready})")

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS.get(key) or ord(key.upper()))

    def media(self, media="", **features):
        """As the visitor's settings are: media("print"), media(prefers_color_scheme="dark"); media() ends it."""
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": name.replace("_", "-"), "value": value} for name, value in features.items()])

    def picture(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        with open(path, "wb") as f:
            f.write(base64.b64decode(shot["data"]))

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)


failures = 0


def expect(what, is_so, seen=""):
    global failures
    print(f"{'ok  ' if is_so else 'FAIL'} {what}{f': {seen}' if seen != '' else ''}", flush=True)
    failures += not is_so


def run(visit):
    """visit(browser, the folder for screenshots or None), and the exit status: 1 if something was not as it should be."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not binary:
        return print(f"{os.path.basename(sys.argv[0])}: skipped: no chromium")
    pictures = sys.argv[sys.argv.index("--screenshots") + 1] if "--screenshots" in sys.argv else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        browser = Browser(binary, directory)
        try:
            visit(browser, pictures)
        finally:
            browser.process.terminate(), browser.process.wait()
    sys.exit(failures > 0)
