"""A folder of images and the server of its page, in this process."""

from collections.abc import Callable
import contextlib
import http.client
import json
import threading
from typing import NamedTuple

from PIL import Image
import uvicorn

from flatmatch_jax.label import rank, server
from flatmatch_jax.label.store import Store

TOKEN = 'a-token'


def make_images(folder, number=8):
  """Images of one colour each, and a text that is called an image."""
  folder.mkdir(parents=True)
  for i in range(number):
    size = 20 if i % 2 else 400
    Image.new('RGB', (size, size // 2), (30 * i, 99, 200)).save(
      folder / f'{i}.png'
    )
  (folder / 'text.jpg').write_text('not an image')


class Served(NamedTuple):
  """A running server."""

  store: Store
  ranking: rank.Ranking
  port: int
  stop: Callable

  @property
  def url(self):
    return f'http://127.0.0.1:{self.port}/?token={TOKEN}'

  def request(self, method, path, body=None, **headers):
    """Status, headers and content of an answer."""
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
    try:
      connection.putrequest(method, path, skip_host='Host' in headers)
      content = b'' if body is None else json.dumps(body).encode()
      headers['Content-Length'] = str(len(content))
      for name, value in headers.items():
        connection.putheader(name.replace('_', '-'), value)
      connection.endheaders(content)
      answer = connection.getresponse()
      return answer.status, dict(answer.getheaders()), answer.read()
    finally:
      connection.close()

  def ask(self, path, /, **body):
    """What the page gets."""
    body = {'count': 4, 'shown': []} | body
    found = self.request('POST', f'/{path}', body, X_Token=TOKEN)
    return found[0], json.loads(found[2])


@contextlib.contextmanager
def served(folder):
  store = Store(folder)
  ranking = rank.Ranking(store)
  ranking.run()
  listener = server.listen(0)
  port = listener.getsockname()[1]
  app = server.create(store, ranking, TOKEN, port)
  running = uvicorn.Server(server.settings(app))
  thread = threading.Thread(target=running.run, args=[[listener]])
  thread.start()

  def end():
    running.should_exit = True
    thread.join()

  try:
    yield Served(store, ranking, port, end)
  finally:
    end()
    store.close()
