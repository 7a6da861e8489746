"""The page and what it asks for, over HTTP on this machine alone.

Whoever asks must know the token, which is in the address that the command
prints; later requests carry it as a header. Files have numbers here, never
paths.
"""

import base64
import hashlib
import hmac
import io
import pathlib
import socket
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
import uvicorn

from flatmatch_jax.data import images
from flatmatch_jax.label.rank import Guess, Ranking
from flatmatch_jax.label.store import Store
from flatmatch_jax.system import cli, messages
from flatmatch_jax.types import UserError

HOST = '127.0.0.1'

_HERE = pathlib.Path(__file__).parent
_SIDES = {'small': 256, 'large': 1280}  # Pixels.
_SMALL = 64  # Up to here an image is sent without loss.
_MOST = 100  # Images that a page may show.


def listen(port: int) -> socket.socket:
  """A socket of this machine alone; port 0 is any that is free."""
  listener = socket.socket()
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listener.bind((HOST, port))
    listener.listen()
  except (OSError, OverflowError) as error:
    listener.close()
    reason = getattr(error, 'strerror', None) or str(error).rstrip('.')
    raise UserError(
      f'--port {port} cannot be used: {reason}; choose another, or leave it '
      'out for any that is free.'
    ) from None
  return listener


def settings(app) -> uvicorn.Config:
  return uvicorn.Config(
    app,
    access_log=False,
    http='h11',
    lifespan='off',
    log_level='warning',
    server_header=False,
    timeout_graceful_shutdown=2,
    ws='none',
  )


def serve(app, listener: socket.socket) -> None:
  """Answers until Ctrl-C."""
  uvicorn.Server(settings(app)).run([listener])


def create(store: Store, ranking: Ranking, token: str, port: int):
  """The application, as ASGI has it."""
  page, policy = _page()

  def index(request):
    del request
    return HTMLResponse(page, headers={'Content-Security-Policy': policy})

  def image(request):
    return _image(store, request)

  async def act(request: Request):
    try:
      body = await request.json()
    except (ValueError, ClientDisconnect):  # The browser has gone away.
      return _refuse(400, 'The request is not JSON.')
    action = request.path_params['action']
    return await run_in_threadpool(answer, action, body)

  def answer(action, body):
    try:
      return JSONResponse(_act(store, ranking, action, body))
    except (UserError, OSError) as error:
      _, line = cli.describe(error) or (2, messages.printable(str(error)))
      return _refuse(409, line.removeprefix('error: '))
    except (KeyError, TypeError, ValueError, IndexError):
      return _refuse(400, f'The page asked wrongly for {action!r}.')

  routes = [
    Route('/', index),
    Route('/image/{number:int}', image),
    Route('/{action}', act, methods=['POST']),
  ]
  return guard(Starlette(routes=routes), token, port)


def guard(app, token: str, port: int):
  """Lets in only who has the token, from a page of this very server.

  The name in the header Host must be this machine's: otherwise another page
  could give its own name this address (DNS rebinding).
  """
  hosts = {f'{HOST}:{port}', f'localhost:{port}'}

  async def guarded(scope, receive, send):
    request = Request(scope)
    headers = request.headers
    given = headers.get('x-token', '')
    if request.method == 'GET':  # Pages and images have no headers of ours.
      given = given or request.query_params.get('token', '')
    origin = headers.get('origin')
    if headers.get('host') not in hosts:
      response = _refuse(421, 'This is not the address of the page.')
    elif origin is not None and origin not in {f'http://{h}' for h in hosts}:
      response = _refuse(403, 'Another page may not ask.')
    elif not hmac.compare_digest(given.encode(), token.encode()):
      response = _refuse(
        403, 'Open the whole address that the command printed, with its token.'
      )
    else:
      response = app
    await response(scope, receive, _with_headers(send))

  return guarded


def _with_headers(send):
  async def sending(message):
    if message['type'] == 'http.response.start':
      headers = MutableHeaders(scope=message)
      headers['Cross-Origin-Resource-Policy'] = 'same-origin'
      headers['Referrer-Policy'] = 'no-referrer'
      headers['X-Content-Type-Options'] = 'nosniff'
      headers.setdefault('Cache-Control', 'no-store')
    await send(message)

  return sending


def _refuse(status: int, reason: str) -> JSONResponse:
  return JSONResponse({'error': reason}, status)


def _act(store: Store, ranking: Ranking, action: str, body) -> dict[str, Any]:
  """Does what a key asked for; returns what the page shows next."""
  number: int | None = None
  notes: list[str] = []
  shown = list(map(int, body['shown']))[:_MOST]
  if action == 'label':
    number, notes = store.label(_labels(store, body))
  elif action == 'skip':
    number = store.skip(map(int, body['images']))
  elif action == 'undo':
    shown = store.undo(body.get('action')) + shown
  elif action == 'again':
    store.again()
  elif action != 'show':
    raise ValueError(action)
  found = store.next(min(int(body['count']), _MOST), shown)
  return {
    'action': number,
    'notes': notes,
    'folder': messages.printable(str(store.root)),
    'busy': ranking.busy,
    'labeled': sum(store.counts.values()),
    'pending': len(store.pending),
    'skipped': len(store.skipped),
    'unreadable': [
      f'{store.name(number)} ({reason})'
      for number, reason in list(store.unreadable.items())[-3:]
    ],
    'classes': [
      {'name': messages.printable(name), 'count': store.counts.get(name, 0)}
      for name in store.classes
    ],
    'images': [
      {'id': number, 'name': store.name(number)}
      | ranking.guesses.get(number, Guess(None, 0.0))._asdict()
      for number in found
    ],
  }


def _labels(store, body):
  """Pairs of image and class; `name` is a class, perhaps a new one."""
  if 'name' in body:
    label = store.add_class(str(body['name']))
    return [(int(number), label) for number in body['images']]
  pairs = [(int(number), int(label)) for number, label in body['labels']]
  if any(not 0 <= label < len(store.classes) for _, label in pairs):
    raise ValueError('no such class')
  return pairs


def _image(store, request):
  """A picture of a file, made anew: a browser never gets the file itself."""
  number = request.path_params['number']
  try:
    side = _SIDES[request.query_params.get('size', 'small')]
    picture = images.whole(store.path(number), side)
  except LookupError:  # No such number, or no such size.
    return _refuse(404, 'There is no such image.')
  except ValueError as error:
    store.set_unreadable(number, str(error))
    return _refuse(404, f'{store.name(number)} cannot be read: {error}.')
  kind = 'png' if max(picture.size) <= _SMALL else 'jpeg'
  buffer = io.BytesIO()
  picture.save(buffer, format=kind, quality=85)
  return Response(
    buffer.getvalue(),
    media_type=f'image/{kind}',
    headers={'Cache-Control': 'private, max-age=3600'},
  )


def _page() -> tuple[str, str]:
  """The page with its script and style, and a policy that allows just them."""
  page = (_HERE / 'page.html').read_text()
  policy = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; img-src 'self' data:; connect-src 'self'"
  )
  for kind, file in (('script', 'script.js'), ('style', 'style.css')):
    text = (_HERE / file).read_text()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy += f"; {kind}-src 'sha256-{digest}'"
    page = page.replace(f'{{{kind}}}', text)
  return page, policy
