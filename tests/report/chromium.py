"""Headless Chromium by its debugging pipe: what a test of a page needs, and nothing to install beside the browser."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def _beyond_ten(end):
    """Another number for a file descriptor, which no other is in the way of."""
    try:
        return fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(end)


class Chromium:
    """A browser with one page. `with Chromium(folder) as page:`, folder: an empty one, for its profile."""

    def __init__(self, profile):
        self.numbers, self.session, self.errors = itertools.count(1), None, []
        # It reads from its file descriptor 3 and writes to 4.
        (theirs_in, self.out), (self.into, theirs_out) = [[_beyond_ten(end) for end in os.pipe()] for _ in range(2)]
        command = [BROWSER, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--disable-dev-shm-usage", "--no-first-run", "--disable-features=IsolateSandboxedIframes",
                   f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        arranged = f"import os; os.dup2({theirs_in}, 3); os.dup2({theirs_out}, 4); os.execv({BROWSER!r}, {command!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", arranged], pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.unread = b""

    def __enter__(self):
        (target,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.session = None
        self.call("Browser.close")
        os.close(self.out)
        os.close(self.into)
        self.process.wait(30)

    def call(self, method, **params):
        """The result of a method of the DevTools protocol. What the page complains of meanwhile is in `errors`."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                return found["result"]

    def _next(self):
        while b"\0" not in self.unread:
            read = os.read(self.into, 1 << 20)
            assert read, "the browser has ended"
            self.unread += read
        message, _, self.unread = self.unread.partition(b"\0")
        found = json.loads(message)
        if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(found["params"])
        if found.get("method") == "Network.requestWillBeSent":
            url = found["params"]["request"]["url"]
            self.errors += [url] if not url.startswith(("file:", "data:", "about:")) else []
        return found

    def open(self, path, width=1440, height=900, dark=False):
        """Show a file in a window of that size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.absolute().as_uri())
        assert self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script):
        """The value of an expression of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script, seconds=30):
        """Whether an expression is true before long: what a click leads to may come a turn of the page's loop later."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)) and time.monotonic() < end:
            time.sleep(0.02)
        return bool(found)

    def click(self, script):
        """Press and release the mouse on the element that `script` names."""
        self.run(f"({script}).scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(r => [r.x + Math.min(r.width / 2, 60), r.y + r.height / 2])(({script}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, code):
        """A key on what has the focus; code: its number in Windows."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path, full=True):
        """Write a picture of the page, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))
