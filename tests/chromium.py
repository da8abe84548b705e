"""A real browser that types, presses keys and takes pictures, controlled through its debugging pipe."""

import base64
import fcntl
import json
import os
import subprocess
import time

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync", "--remote-debugging-pipe")
NAMED_KEYS = {"Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13}
WAIT_S = 30.0


class Chromium:
    """Messages are JSON, each ended by a zero byte: commands go to its descriptor 3, answers come from 4."""

    def __init__(self, program, profile):
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Above 3 and 4, so that neither is overwritten before it has been copied.
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (commands, answers)]

        def connect():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (commands, answers, *ends):
            os.close(one)
        self._number, self._read, self._session = 0, b"", None
        self.said = []  # errors and messages of its console

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(answer["params"])

    def _next(self):
        while b"\0" not in self._read:
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, address):
        self.call("Page.navigate", url=address)

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, condition):
        started = time.monotonic()
        while not self.evaluate(condition):
            assert time.monotonic() - started < WAIT_S, f"{condition} does not become true"
            time.sleep(0.05)

    def press(self, key):
        """A key by its name, or a character."""
        code = {"windowsVirtualKeyCode": NAMED_KEYS[key]} if key in NAMED_KEYS else {"text": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path, width, height, *, dark):
        """A screenshot as PNG."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(1)  # until everything is drawn
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
