"""Who gets in, and what they get."""

import io
import logging
import os
import socket
import sys
import time

from PIL import Image
import pytest
import serving

from flatmatch_jax.label import __main__ as command
from flatmatch_jax.label import server
from flatmatch_jax.types import UserError


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """For tests that change nothing."""
  folder = tmp_path_factory.mktemp('photos')
  serving.make_images(folder / 'unlabeled')
  (folder / 'secret.png').write_bytes(b'secret')
  with serving.served(folder) as served:
    yield served


@pytest.fixture
def fresh(tmp_path):
  serving.make_images(tmp_path / 'unlabeled')
  with serving.served(tmp_path) as served:
    yield served


WITH = {'X_Token': serving.TOKEN}
SHOW = {'count': 4, 'shown': []}


@pytest.mark.parametrize('path', ['/', '/image/0', '/show', '/nothing'])
@pytest.mark.parametrize('method', ['GET', 'POST'])
@pytest.mark.parametrize('token', ['', 'wrong', '%C3%A4', 'a-token%20'])
def test_nobody_gets_in_without_the_token(shared, method, path, token):
  for query, headers in ((f'?token={token}', {}), ('', {'X_Token': token})):
    status, _, content = shared.request(method, path + query, SHOW, **headers)
    assert status == 403
    assert b'.png' not in content


def test_the_address_alone_changes_nothing(shared):
  """A link or a form of another page cannot send the header."""
  path = f'/show?token={serving.TOKEN}'
  assert shared.request('POST', path, SHOW)[0] == 403
  assert shared.request('GET', path, **WITH)[0] == 405
  assert shared.request('POST', '/show', SHOW, **WITH)[0] == 200


@pytest.mark.parametrize('host', ['evil.example', '127.0.0.1', 'localhost:1'])
def test_other_names_of_this_address_are_refused(shared, host):
  assert shared.request('GET', '/', Host=host, **WITH)[0] == 421
  port = shared.port
  for name in ('localhost', '127.0.0.1'):
    found = shared.request('GET', '/', Host=f'{name}:{port}', **WITH)
    assert found[0] == 200


def test_other_pages_are_refused(shared):
  here = f'http://127.0.0.1:{shared.port}'
  for origin, status in (
    ('http://evil.example', 403),
    ('http://127.0.0.1:1', 403),
    ('null', 403),
    (here, 200),
  ):
    found = shared.request('POST', '/show', SHOW, Origin=origin, **WITH)
    assert found[0] == status, origin
    assert not any(name.startswith('access-control') for name in found[1])


def test_headers_keep_the_page_to_itself(shared):
  _, headers, content = shared.request('GET', '/', **WITH)
  policy = headers['content-security-policy']
  assert policy.startswith("default-src 'none'")
  assert "frame-ancestors 'none'" in policy
  assert 'unsafe' not in policy
  assert headers['referrer-policy'] == 'no-referrer'
  assert headers['cross-origin-resource-policy'] == 'same-origin'
  assert serving.TOKEN.encode() not in content


@pytest.mark.parametrize(
  'path',
  [
    '/image/../secret.png',
    '/image/..%2f..%2fsecret.png',
    '/image/%2e%2e/secret.png',
    '//secret.png',
    '/image/-1',
    '/image/99999999999999999999',
    '/image/9',
  ],
)
def test_paths_do_not_leave_the_folder(shared, path):
  status, _, content = shared.request('GET', path, **WITH)
  assert status in (404, 405)
  assert content != b'secret'


@pytest.mark.parametrize(
  ('action', 'body'),
  [
    ('nothing', {}),
    ('show', {'shown': 'abc'}),
    ('show', {'count': None}),
    ('label', {}),
    ('label', {'labels': [[0, 0]]}),
    ('label', {'labels': [[0, -1]]}),
    ('label', {'labels': 7}),
    ('label', {'name': 'cat', 'images': [77]}),
    ('skip', {'images': [[]]}),
    ('undo', {'action': []}),
  ],
)
def test_wrong_requests_change_nothing(shared, action, body):
  before = len(shared.store.pending)
  status, found = shared.ask(action, **body)
  assert status == 400
  assert 'asked wrongly' in found['error']
  assert len(shared.store.pending) == before
  assert shared.request('POST', '/show', **WITH)[0] == 400  # Not JSON.


def test_a_browser_that_goes_away_leaves_no_traceback(fresh):
  logged = []
  handler = logging.Handler()
  handler.emit = logged.append
  logger = logging.getLogger('uvicorn.error')
  logger.addHandler(handler)
  head = f'Host: 127.0.0.1:{fresh.port}\r\nX-Token: {serving.TOKEN}\r\n'
  for request in (
    f'POST /show HTTP/1.1\r\n{head}Content-Length: 99\r\n\r\n{{"cou',
    f'GET /image/0?size=large HTTP/1.1\r\n{head}\r\n',
  ):
    with socket.create_connection(('127.0.0.1', fresh.port)) as browser:
      browser.sendall(request.encode())
      time.sleep(0.2)
  assert fresh.ask('show')[0] == 200
  fresh.stop()  # Then all is logged.
  logger.removeHandler(handler)
  assert [record.getMessage() for record in logged] == []


def test_pictures_are_made_anew(shared):
  sizes = {'small': (256, 128), 'large': (400, 200)}
  for size, shape in sizes.items():
    path = f'/image/0?size={size}'
    status, headers, content = shared.request('GET', path, **WITH)
    assert (status, headers['content-type']) == (200, 'image/jpeg')
    assert Image.open(io.BytesIO(content)).size == shape
  _, headers, content = shared.request('GET', '/image/1', **WITH)
  assert headers['content-type'] == 'image/png'
  assert Image.open(io.BytesIO(content)).getpixel((3, 3)) == (30, 99, 200)
  assert shared.request('GET', '/image/0?size=huge', **WITH)[0] == 404


def test_a_page_does_not_grow_with_the_folder(tmp_path):
  for i in range(3000):
    (tmp_path / f'{i}.png').touch()
  store = server.Store(tmp_path)
  ranking = server.Ranking(store)
  body = {'count': 24, 'shown': []}
  found = server._act(store, ranking, 'show', body)
  assert found['pending'] == 3000
  assert len(str(found)) < 5000
  store.close()


def test_two_tabs(fresh):
  """They see the same images; the second label for one changes nothing."""
  _, one = fresh.ask('show')
  _, two = fresh.ask('show')
  image = one['images'][0]['id']
  assert two['images'] == one['images']
  _, one = fresh.ask('label', name='cat', images=[image])
  status, two = fresh.ask('label', name='dog', images=[image])
  assert (status, two['action']) == (200, None)
  assert two['notes'] == [
    f'{fresh.store.name(image)} has been dealt with already.'
  ]
  assert two['classes'] == [
    {'name': 'cat', 'count': 1},
    {'name': 'dog', 'count': 0},
  ]
  assert image not in [shown['id'] for shown in two['images']]
  _, one = fresh.ask('undo', action=one['action'], shown=[7])
  assert [shown['id'] for shown in one['images'][:2]] == [image, 7]


def test_a_text_that_is_called_an_image(fresh):
  assert list(fresh.store.unreadable) == [8]
  fresh.store.unreadable.clear()
  fresh.store.pending.add(8)  # As if it had not been looked at.
  status, _, content = fresh.request('GET', '/image/8', **WITH)
  assert (status, b'not one of PNG' in content) == (404, True)
  _, found = fresh.ask('show')
  assert found['unreadable'] == [
    'text.jpg (not one of PNG, JPEG, WEBP, BMP, GIF, TIFF, HEIC)'
  ]
  assert found['pending'] == 8


@pytest.mark.parametrize(
  ('name', 'line'),
  [
    ('cats/dogs', 'has a slash'),
    ('', 'is empty'),
  ],
)
def test_class_names_are_refused_in_a_line(fresh, name, line):
  status, found = fresh.ask('label', name=name, images=[0])
  assert status == 409
  assert line in found['error']


def test_a_folder_that_cannot_be_written(fresh, monkeypatch):
  def refuse(*_, **__):
    raise PermissionError(13, os.strerror(13), 'labeled')

  monkeypatch.setattr(os, 'open', refuse)
  status, found = fresh.ask('label', name='cat', images=[0])
  assert status == 409
  assert 'Permission denied' in found['error']
  assert 'change its permissions' in found['error']
  assert len(fresh.store.pending) == 8


# The command.


def run(monkeypatch, *arguments):
  monkeypatch.setattr(sys, 'argv', ['label', *map(str, arguments)])
  command.main()


def test_a_port_in_use(monkeypatch, tmp_path):
  serving.make_images(tmp_path / 'unlabeled')
  with socket.socket() as other:
    other.bind(('127.0.0.1', 0))
    other.listen()
    port = other.getsockname()[1]
    with pytest.raises(
      UserError, match=r'Address already in use.*leave it out'
    ):
      run(monkeypatch, tmp_path, '--port', port)
  for port in (-1, 2**16):
    with pytest.raises(UserError, match='--port'):
      server.listen(port)


def test_the_socket_is_of_this_machine_alone():
  with server.listen(0) as listener:
    assert listener.getsockname()[0] == '127.0.0.1'


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr(command.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"pip install -e '\.\[label\]'"):
    run(monkeypatch, tmp_path)


def test_a_read_only_folder(monkeypatch, tmp_path):
  serving.make_images(tmp_path / 'unlabeled')

  def refuse(*_, **__):
    raise OSError(30, os.strerror(30))

  monkeypatch.setattr(os, 'open', refuse)
  with pytest.raises(UserError, match=r'Cannot write .*Read-only file system'):
    run(monkeypatch, tmp_path)
