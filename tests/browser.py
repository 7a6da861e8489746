"""A headless Chromium for tests, driven by DevTools messages over two pipes.

No port, no driver program and no package: Chromium reads commands from file
descriptor 3 and writes answers and events to 4, as JSON that ends with a zero.
"""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
_FLAGS = (
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--disable-dev-shm-usage',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
  '--remote-debugging-pipe',
)
# Puts the pipes where Chromium looks for them.
_START = """
import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
  os.dup2(end, place)
  os.set_inheritable(place, True)  # If it was there already.
os.execvp(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 120  # Seconds that an answer may take.


def find() -> str | None:
  """The path of a browser, if there is one."""
  return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
  """One page. `events` are what it told so far, oldest first."""

  def __init__(self, reading: int, writing: int):
    self._reading, self._writing = reading, writing
    self._numbers, self._rest = itertools.count(1), b''
    self._session: str | None = None
    self.events: list[dict] = []
    target = self.call('Target.createTarget', url='about:blank')['targetId']
    self._session = self.call(
      'Target.attachToTarget', targetId=target, flatten=True
    )['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.call(f'{domain}.enable')

  def call(self, method: str, **params) -> dict:
    """Sends a command and waits for its answer."""
    number = next(self._numbers)
    message = {'id': number, 'method': method, 'params': params}
    if self._session:
      message['sessionId'] = self._session
    os.write(self._writing, json.dumps(message).encode() + b'\0')
    while (answer := self._receive()).get('id') != number:
      self.events.append(answer)
    if 'error' in answer:
      raise RuntimeError(f'{method}: {answer["error"]["message"]}')
    return answer['result']

  def _receive(self) -> dict:
    until = time.monotonic() + _PATIENCE
    while b'\0' not in self._rest:
      left = max(0.0, until - time.monotonic())
      if not select.select([self._reading], [], [], left)[0]:
        raise TimeoutError('the browser does not answer')
      chunk = os.read(self._reading, 1 << 16)
      if not chunk:
        raise RuntimeError('the browser has ended')
      self._rest += chunk
    message, _, self._rest = self._rest.partition(b'\0')
    return json.loads(message)

  def look(self, width: int, height: int, dark: bool = False) -> None:
    """The size of the window, and the scheme that the user prefers."""
    self.call(
      'Emulation.setDeviceMetricsOverride',
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )
    scheme = {
      'name': 'prefers-color-scheme',
      'value': 'dark' if dark else 'light',
    }
    self.call('Emulation.setEmulatedMedia', features=[scheme])

  def open(self, path: pathlib.Path) -> None:
    """Loads a file, from the beginning to the end."""
    self.events.clear()
    self.call('Page.navigate', url=path.absolute().as_uri())
    while not any(e['method'] == 'Page.loadEventFired' for e in self.events):
      self.events.append(self._receive())

  def evaluate(self, expression: str):
    """The value of JavaScript, as JSON can hold it."""
    answer = self.call(
      'Runtime.evaluate', expression=expression, returnByValue=True
    )
    if 'exceptionDetails' in answer:
      raise RuntimeError(answer['exceptionDetails']['exception']['description'])
    return answer['result'].get('value')

  def press(self, key: str, code: int) -> None:
    """A key with the number that keyboards give it."""
    text = '\r' if key == 'Enter' else ''
    for kind in ('keyDown', 'keyUp'):
      self.call(
        'Input.dispatchKeyEvent',
        type=kind,
        key=key,
        code=key,
        text=text if kind == 'keyDown' else '',
        windowsVirtualKeyCode=code,
      )

  def move(self, x: float, y: float) -> None:
    self.call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)

  def screenshot(self, path: pathlib.Path, whole: bool = True) -> None:
    answer = self.call('Page.captureScreenshot', captureBeyondViewport=whole)
    path.write_bytes(base64.b64decode(answer['data']))

  def complaints(self) -> list[str]:
    """Errors and warnings of the page, and of what it asked for."""
    kinds = (
      'Runtime.exceptionThrown',
      'Log.entryAdded',
      'Network.loadingFailed',
    )
    return [
      json.dumps(event)
      for event in self.events
      if event['method'] in kinds
      or event['method'] == 'Runtime.consoleAPICalled'
    ]

  def requests(self) -> list[str]:
    """What the page asked for, itself and pictures inside it left out."""
    sent = [
      event['params']['request']['url']
      for event in self.events
      if event['method'] == 'Network.requestWillBeSent'
    ]
    return [url for url in sent[1:] if not url.startswith('data:')]


@contextlib.contextmanager
def start(program: str):
  """A browser with an empty profile, gone afterwards."""
  to_browser, from_browser = os.pipe(), os.pipe()
  ends = to_browser[0], from_browser[1]  # The browser's.
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    command = [program, *_FLAGS, f'--user-data-dir={profile}']
    process = subprocess.Popen(
      [sys.executable, '-c', _START, *map(str, ends), *command],
      pass_fds=ends,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    for end in ends:
      os.close(end)
    try:
      yield Browser(from_browser[0], to_browser[1])
    finally:
      os.close(to_browser[1])  # Then it ends by itself.
      os.close(from_browser[0])
      try:
        process.wait(timeout=20)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
