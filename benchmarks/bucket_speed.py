"""Records a second from a bucket that answers late.

  python benchmarks/bucket_speed.py --latency 0.02

The bucket is a server on this machine that waits before each answer. Records
of photographs are read at random, as in training, and in order, as for a test:
one after the other and many at once.
"""

import argparse
import contextlib
import dataclasses
import http.server
import os
import pathlib
import sys
import tempfile
import threading
import time
from unittest import mock
import urllib.parse

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import input_speed


@contextlib.contextmanager
def serving(folder, latency: float = 0.0, failures: int = 0):
  """Serves ranges of the files of a folder as gs://bucket; yields requests.

  So many of the first requests fail with 503.
  """
  requests: list[str] = []

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
      requests.append(self.headers['Range'])
      time.sleep(latency)
      if len(requests) <= failures:
        self.send_error(503)
        return
      name = urllib.parse.urlsplit(self.path).path.rsplit('/', 1)[-1]
      path = pathlib.Path(folder) / urllib.parse.unquote(name)
      first, last = self.headers['Range'].removeprefix('bytes=').split('-')
      with path.open('rb') as file:
        file.seek(int(first))
        part = file.read(int(last) + 1 - int(first))
      size = path.stat().st_size
      self.send_response(206)
      self.send_header('Content-Range', f'bytes {first}-{last}/{size}')
      self.send_header('X-Goog-Generation', '1')
      self.send_header('Content-Length', str(len(part)))
      self.end_headers()
      self.wfile.write(part)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = {
    'TENSORSTORE_GCS_HTTP_URL': f'http://127.0.0.1:{server.server_port}',
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'x',
  }
  with mock.patch.dict(os.environ, address):
    yield requests
  server.shutdown()
  server.server_close()


def in_bucket(images):
  """The same records, with their files at gs://bucket."""
  names = [os.path.basename(path) for path in images.files]
  return dataclasses.replace(
    images, files=tuple(f'gs://bucket/{name}' for name in names)
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--latency', type=float, default=0.02, help='in seconds')
  parser.add_argument('--images', type=int, default=128)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    input_speed.prepare(folder, args.images)
    images = input_speed.open_data(folder).images.records
    path = pathlib.Path(images.files[0]).parent
    with serving(path, args.latency) as requests:
      remote = in_bucket(images)
      remote.read(0)  # Connects.
      quarter = max(1, len(images) // 4)
      shuffled = np.random.default_rng(0).permutation(len(images))
      for name, rows, size in (
        ('at random, one by one', shuffled, 1),
        ('at random, a quarter at once', shuffled, quarter),
        ('in order, a quarter at once', np.arange(len(images)), quarter),
      ):
        requests.clear()
        began = time.perf_counter()
        for at in range(0, len(rows), size):
          for read in remote.start(rows[at : at + size]):
            read()
        speed = len(rows) / (time.perf_counter() - began)
        print(f'{name}: {speed:.0f} records/s, {len(requests)} requests')


if __name__ == '__main__':
  main()
