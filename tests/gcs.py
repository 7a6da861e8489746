"""A Google Cloud Storage server on this machine, for tests with real clients.

It speaks as much of the JSON API as TensorStore, TensorFlow (through epath and
Orbax) and google-cloud-storage ask of it: generations and preconditions, whole,
multipart and resumable uploads, ranges, listing by pages, rewrite, compose,
batches. TensorFlow knows only Google's own hosts, which it reaches through this
server as a proxy, by TLS. It is a process of its own, as TensorFlow may ask for
something while it keeps Python's other threads from running.

  with gcs.serving(folder) as bucket:
    ...  # gs://bucket is here for whoever has `bucket.environment`.
    bucket.fail(503, method='POST', times=2)
"""

import base64
import contextlib
import datetime
import hashlib
import http.server
import itertools
import json
import pathlib
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple
import urllib.parse
import urllib.request

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOSTS = ('storage.googleapis.com', 'www.googleapis.com')
_PAGE = 100  # Names; so few that tests see several pages.
_REASONS = {
  403: 'forbidden',
  404: 'notFound',
  412: 'conditionNotMet',
  429: 'rateLimitExceeded',
  503: 'backendError',
}


class Blob(NamedTuple):
  """An object of a bucket."""

  content: bytes
  generation: int


class Fault(NamedTuple):
  """What goes wrong with requests that match."""

  # A status; 'reset' in the middle of a body; 'lost', an answer that does not
  # arrive though the request was served; 'stall', no answer ever.
  what: int | str
  method: str
  path: str  # A pattern of the path and query.
  left: int  # So many more.
  text: str  # For people.


# TensorFlow would remember for seconds what there was in another test, and wait
# up to 32 s between ten attempts. It reads this only once, when it is imported.
OF_TENSORFLOW = {
  'GCS_STAT_CACHE_MAX_AGE': '0',
  'GCS_RETRY_CONFIG_INIT_DELAY_TIME_US': '10000',
  'GCS_RETRY_CONFIG_MAX_DELAY_TIME_US': '50000',
  'GCS_RETRY_CONFIG_MAX_RETRIES': '1',
  'GCS_READ_CACHE_BLOCK_SIZE_MB': '1',  # Fewer bytes to make room for.
}


class Bucket:
  """The server as a test sees it."""

  def __init__(self, url, ca):
    self._url = url
    self.environment = {
      'TENSORSTORE_GCS_HTTP_URL': url,
      'STORAGE_EMULATOR_HOST': url,
      'GOOGLE_CLOUD_PROJECT': 'test',
      'https_proxy': url,
      'no_proxy': 'localhost',  # For processes that find each other there.
      'CURL_CA_BUNDLE': str(ca),
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token',
      'NO_GCE_CHECK': 'true',
    } | OF_TENSORFLOW

  def _ask(self, what, *args):
    request = urllib.request.Request(
      f'{self._url}/-/{what}', json.dumps(args).encode(), method='POST'
    )
    with urllib.request.urlopen(request) as answer:
      return json.loads(answer.read())

  def fail(self, what, method='', path='', times=10**9, text='') -> None:
    """From now on requests that match fail, until `heal`."""
    self._ask('fail', what, method, path, times, text)

  def heal(self) -> None:
    """No request fails, and there is one bucket."""
    self._ask('heal')

  def drop(self) -> None:
    """The bucket is deleted, with all that is in it."""
    self._ask('drop')

  def contents(self, prefix='') -> dict[str, bytes]:
    """Of all objects below a folder, by the rest of their names."""
    found = self._ask('contents', prefix)
    return {name: base64.b64decode(text) for name, text in found.items()}

  def put(self, name: str, content: bytes | None) -> None:
    """As if somebody else had; None deletes."""
    text = None if content is None else base64.b64encode(content).decode()
    self._ask('put', name, text)

  def download(self, prefix: str, folder: pathlib.Path) -> pathlib.Path:
    """The same as files."""
    for name, content in self.contents(prefix).items():
      if content or not name.endswith('/'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder

  def wait_for(self, words: str, process, seconds: float = 300) -> None:
    """Returns when a request matches `words`; `process` is to make it."""
    until = time.monotonic() + seconds
    while not any(re.search(words, request) for request in self.requests()):
      assert process.poll() is None, process.stderr.read()
      assert time.monotonic() < until
      time.sleep(0.05)

  def requests(self) -> list[str]:
    """Method and path of all since the last call."""
    return self._ask('requests')


@contextlib.contextmanager
def serving(folder):
  folder.mkdir(parents=True, exist_ok=True)
  with subprocess.Popen(
    [sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True
  ) as process:
    try:
      port = int(process.stdout.readline())
      yield Bucket(f'http://127.0.0.1:{port}', folder / 'ca.pem')
    finally:
      process.kill()


class Server(http.server.ThreadingHTTPServer):
  """Buckets by name; a bucket holds blobs by name."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, folder):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.buckets: dict[str, dict[str, Blob]] = {'bucket': {}}
    self.lock = threading.RLock()
    self.generations = itertools.count(1001)
    self.faults: list[Fault] = []
    self.seen: list[str] = []
    self.uploads: dict[str, tuple[str, str, dict, bytearray]] = {}
    self.tls = _certify(folder)

  def fault(self, method, path) -> Fault | None:
    with self.lock:
      for number, fault in enumerate(self.faults):
        right = fault.method in ('', method) and re.search(fault.path, path)
        if right and fault.left:
          self.faults[number] = fault._replace(left=fault.left - 1)
          return fault
    return None

  # What a test asks for.

  def fail(self, *fault):
    self.faults.append(Fault(*fault))

  def heal(self):
    self.faults.clear()
    self.buckets.setdefault('bucket', {})

  def drop(self):
    del self.buckets['bucket']

  def contents(self, prefix):
    return {
      name.removeprefix(prefix).lstrip('/'): base64.b64encode(blob[0]).decode()
      for name, blob in sorted(self.buckets['bucket'].items())
      if name.startswith(prefix)
    }

  def put(self, name, text):
    if text is None:
      del self.buckets['bucket'][name]
    else:
      _write(self, 'bucket', name, base64.b64decode(text), {})

  def requests(self):
    seen, self.seen = self.seen, []
    return seen

  def handle_error(self, request, client_address):
    """Clients that are killed hang up."""


def _certify(folder) -> ssl.SSLContext:
  """For Google's hosts, by an authority in ca.pem that nobody else trusts."""
  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'test')])
  now = datetime.datetime.now(datetime.UTC)
  day = datetime.timedelta(days=1)
  certificate = (
    x509.CertificateBuilder(name, name, key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - day)
    .not_valid_after(now + day)
    .add_extension(x509.BasicConstraints(True, None), critical=True)
    .add_extension(
      x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS]),
      critical=False,
    )
    .sign(key, hashes.SHA256())
  )
  pem = serialization.Encoding.PEM
  secret = key.private_bytes(
    pem,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
  )
  (folder / 'ca.pem').write_bytes(certificate.public_bytes(pem))
  (folder / 'key.pem').write_bytes(secret)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(folder / 'ca.pem', folder / 'key.pem')
  return context


class _Refused(Exception):
  """Ends a request with this status."""

  def __init__(self, status, text=''):
    super().__init__(status)
    self.status, self.text = status, text


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server
  protocol_version = 'HTTP/1.1'
  # Or a reply's body would wait for the answer to its header.
  disable_nagle_algorithm = True
  wbufsize = -1

  def log_message(self, *args):
    """Not on the screen."""

  def handle_expect_100(self):
    super().handle_expect_100()
    self.wfile.flush()  # Or clients wait a second.
    return True

  def do_CONNECT(self):
    self.send_response(200)
    self.end_headers()
    self.wfile.flush()
    self.connection = self.server.tls.wrap_socket(
      self.connection, server_side=True
    )
    self.rfile = self.connection.makefile('rb')
    self.wfile = self.connection.makefile('wb')
    self.close_connection = False  # It goes on, by TLS.

  def _answer(self):
    method, url = self.command, urllib.parse.urlsplit(self.path)
    if self.path.startswith('/-/'):
      args = json.loads(self._body())
      with self.server.lock:
        found = getattr(self.server, self.path[3:])(*args)
      return self._reply(*_json(found))
    path = urllib.parse.unquote(self.path)
    self.server.seen.append(f'{method} {path}')
    fault = self.server.fault(method, path)
    if fault and fault.what != 'lost':
      return self._fail(fault)
    body = self._body()
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    with self.server.lock:
      status, headers, content = _call(
        self.server, method, url.path, query, self.headers, body
      )
    if fault:
      return self._hang_up()
    return self._reply(status, headers, content)

  do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _answer

  def _body(self):
    if self.headers.get('Transfer-Encoding') == 'chunked':
      parts = []
      while size := int(self.rfile.readline(), 16):
        parts.append(self.rfile.read(size))
        self.rfile.readline()
      self.rfile.readline()
      return b''.join(parts)
    return self.rfile.read(int(self.headers.get('Content-Length') or 0))

  def _reply(self, status, headers, content):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if status not in (204, 304):
      self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    if self.command != 'HEAD' and status not in (204, 304):
      self.wfile.write(content)
    self.wfile.flush()

  def _hang_up(self):
    """A reset instead of an orderly end."""
    linger = struct.pack('ii', 1, 0)
    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    self.connection.close()
    self.close_connection = True

  def _fail(self, fault):
    if fault.what == 'reset':
      length = int(self.headers.get('Content-Length') or 0)
      self.rfile.read(length // 2)
      self._hang_up()
    elif fault.what == 'stall':
      time.sleep(3600)
    else:
      self._body()
      self._reply(*_error(fault.what, fault.text))


def _error(status, text=''):
  reason = _REASONS.get(status, 'invalid')
  message = text or f'{reason} of the test server'
  error = {
    'code': status,
    'message': message,
    'errors': [{'reason': reason, 'message': message}],
  }
  return status, _JSON, json.dumps({'error': error}).encode()


_JSON = {'Content-Type': 'application/json'}


def _json(content, status=200, **headers):
  return status, _JSON | headers, json.dumps(content).encode()


def _call(server, method, path, query, headers, body):
  """Status, headers and content of the answer to a request."""
  try:
    if path.startswith('/batch'):
      return _batch(server, headers, body)
    return _route(server, method, path, query, headers, body)
  except _Refused as refused:
    return _error(refused.status, refused.text)


def _route(server, method, path, query, headers, body):
  unquote = urllib.parse.unquote
  if match := re.fullmatch(r'/upload/storage/v1/b/([^/]+)/o', path):
    bucket = unquote(match[1])
    blobs = _bucket(server, bucket)
    return _upload(server, blobs, bucket, method, query, headers, body)
  if match := re.fullmatch(
    r'(?:/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?', path
  ):
    bucket, rest = unquote(match[1]), match[2]
    blobs = _bucket(server, bucket)
    if rest is None:
      if path.rstrip('/').endswith('/o'):
        return _list(blobs, bucket, query)
      return _json({'kind': 'storage#bucket', 'name': bucket, 'id': bucket})
    for verb in ('rewriteTo', 'copyTo'):
      source, found, target = rest.partition(f'/{verb}/')
      if found:
        return _copy(server, bucket, verb, unquote(source), target, query)
    if rest.endswith('/compose') and method == 'POST':
      name = unquote(rest.removesuffix('/compose'))
      parts = [
        _get(blobs, x['name']) for x in json.loads(body)['sourceObjects']
      ]
      content = b''.join(part.content for part in parts)
      return _json(_write(server, bucket, name, content, query))
    return _object(server, method, bucket, unquote(rest), query, headers, body)
  bucket, _, name = path.lstrip('/').partition('/')  # The XML API.
  query = query | {'alt': 'media'}
  return _object(
    server, method, unquote(bucket), unquote(name), query, headers, body
  )


def _bucket(server, name):
  if name not in server.buckets:
    raise _Refused(404, 'The specified bucket does not exist.')
  return server.buckets[name]


def _get(blobs, name) -> Blob:
  if name not in blobs:
    raise _Refused(404, f'No such object: {name}')
  return blobs[name]


def _check(blob: Blob | None, query):
  there = blob.generation if blob else 0
  for key, holds in (
    ('ifGenerationMatch', lambda x: there == x),
    ('ifGenerationNotMatch', lambda x: there != x),
  ):
    if key in query and not holds(int(query[key])):
      raise _Refused(304 if key.endswith('NotMatch') else 412)


def _describe(bucket, name, blob):
  digest = hashlib.md5(blob.content).digest()
  return {
    'kind': 'storage#object',
    'bucket': bucket,
    'name': name,
    'size': str(len(blob.content)),
    'generation': str(blob.generation),
    'metageneration': '1',
    'updated': '2026-01-01T00:00:00.000Z',
    'timeCreated': '2026-01-01T00:00:00.000Z',
    'md5Hash': base64.b64encode(digest).decode(),
    'storageClass': 'STANDARD',
  }


def _write(server, bucket, name, content, query):
  blobs = _bucket(server, bucket)
  _check(blobs.get(name), query)
  blobs[name] = Blob(bytes(content), next(server.generations))
  return _describe(bucket, name, blobs[name])


def _object(server, method, bucket, name, query, headers, body):
  blobs = _bucket(server, bucket)
  if method == 'PUT' and query.get('alt') == 'media':
    return _json(_write(server, bucket, name, body, query))
  _check(blobs.get(name), query)
  blob = _get(blobs, name)
  if method == 'DELETE':
    del blobs[name]
    return 204, {}, b''
  if query.get('alt') != 'media':
    return _json(_describe(bucket, name, blob))
  found = {
    'Content-Type': 'application/octet-stream',
    'x-goog-generation': str(blob.generation),
    'x-goog-stored-content-length': str(len(blob.content)),
  }
  asked = re.fullmatch(r'bytes=(\d*)-(\d*)', headers.get('Range', ''))
  if not asked:
    return 200, found, blob.content
  size = len(blob.content)
  if asked[1]:
    first = int(asked[1])
    last = min(int(asked[2] or size - 1), size - 1)
  else:
    first, last = max(size - int(asked[2]), 0), size - 1
  if first > last:
    return 416, found | {'Content-Range': f'bytes */{size}'}, b''
  found['Content-Range'] = f'bytes {first}-{last}/{size}'
  return 206, found, blob.content[first : last + 1]


def _list(blobs, bucket, query):
  """One page of names and, with a delimiter, of what they begin with."""
  prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
  low, high = query.get('startOffset', ''), query.get('endOffset')
  most = min(int(query.get('maxResults', _PAGE)), _PAGE)
  found: dict[str, bool] = {}  # Whether it is an object.
  for name in sorted(blobs):
    if not name.startswith(prefix) or name < low or (high and name >= high):
      continue
    head, cut, tail = name[len(prefix) :].partition(delimiter or '\0')
    if delimiter and cut:
      found[prefix + head + cut] = False
      if not tail and query.get('includeTrailingDelimiter') == 'true':
        found[name] = True
    else:
      found[name] = True
  names = [name for name in found if name > query.get('pageToken', '')]
  page = names[:most]
  answer: dict = {'kind': 'storage#objects'}
  items = [_describe(bucket, n, blobs[n]) for n in page if found[n]]
  if items:
    answer['items'] = items
  if prefixes := [name for name in page if not found[name]]:
    answer['prefixes'] = prefixes
  if len(names) > most:
    answer['nextPageToken'] = page[-1]
  return _json(answer)


def _copy(server, bucket, verb, source, target, query):
  match = re.fullmatch(r'b/([^/]+)/o/(.+)', target)
  to, name = (urllib.parse.unquote(part) for part in match.groups())
  blob = _get(_bucket(server, bucket), source)
  found = _write(server, to, name, blob.content, query)
  if verb == 'copyTo':
    return _json(found)
  size = str(len(blob.content))
  return _json(
    {
      'kind': 'storage#rewriteResponse',
      'done': True,
      'objectSize': size,
      'totalBytesRewritten': size,
      'resource': found,
    }
  )


def _upload(server, blobs, bucket, method, query, headers, body):
  if method == 'PUT':
    return _resume(server, query['upload_id'], headers, body)
  del blobs
  match query.get('uploadType'):
    case 'media':
      return _json(_write(server, bucket, query['name'], body, query))
    case 'multipart':
      mark = re.search('boundary="?([^";]+)', headers['Content-Type'])[1]
      _, head, content, _ = body.split(b'--' + mark.encode(), 3)
      head = json.loads(head.partition(b'\r\n\r\n')[2] or b'{}')
      content = content.partition(b'\r\n\r\n')[2].removesuffix(b'\r\n')
      name = query.get('name') or head['name']
      return _json(_write(server, bucket, name, content, query))
    case 'resumable':
      name = query.get('name') or json.loads(body)['name']
      number = f'upload-{next(server.generations)}'
      server.uploads[number] = bucket, name, query, bytearray()
      host = headers['Host']
      scheme = 'https' if host.startswith(HOSTS) else 'http'
      url = f'{scheme}://{host}/upload/storage/v1/b/{bucket}/o'
      asks = f'?uploadType=resumable&upload_id={number}'
      return _json({}, Location=url + asks)
  raise _Refused(400)


def _resume(server, number, headers, body):
  bucket, name, query, content = server.uploads[number]
  match = re.fullmatch(
    r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)', headers.get('Content-Range', '')
  )
  if match and match[1]:
    content[int(match[1]) :] = body
  elif not match:
    content[:] = body
  total = match[3] if match else str(len(content))
  if total == '*' or len(content) < int(total):
    found = {'Range': f'bytes=0-{len(content) - 1}'} if content else {}
    return 308, found, b''
  return _json(_write(server, bucket, name, content, query))


def _batch(server, headers, body):
  mark = re.search('boundary="?([^";]+)', headers['Content-Type'])[1]
  answers = []
  for part in body.split(b'--' + mark.encode())[1:-1]:
    first = re.search(rb'(GET|POST|DELETE|PATCH) (\S+) HTTP', part)
    url = urllib.parse.urlsplit(first[2].decode())
    query = dict(urllib.parse.parse_qsl(url.query))
    name = re.search(rb'(?i)content-id: *(\S+)', part)
    status, _, content = _call(
      server, first[1].decode(), url.path, query, {}, b''
    )
    answers.append(
      b'--answer\r\nContent-Type: application/http\r\n'
      + (
        b'Content-ID: <response-' + name[1].strip(b'<>') + b'>\r\n'
        if name
        else b''
      )
      + f'\r\nHTTP/1.1 {status} OK\r\nContent-Type: application/json\r\n'
      f'Content-Length: {len(content)}\r\n\r\n'.encode()
      + content
      + b'\r\n'
    )
  kind = {'Content-Type': 'multipart/mixed; boundary=answer'}
  return 200, kind, b''.join(answers) + b'--answer--\r\n'


if __name__ == '__main__':
  server = Server(pathlib.Path(sys.argv[1]))
  print(server.server_port, flush=True)
  server.serve_forever()
