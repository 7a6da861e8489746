"""A page that classifies images in the browser: one file, with all it needs.

The model, ONNX Runtime Web and its WebAssembly are inside, zipped. The policy
of the page allows no connections: it works offline, and images stay there.
"""

import base64
import gzip
import hashlib
import html
import json
import pathlib
import re
import tarfile
from typing import IO, NamedTuple

from flatmatch_jax.system import files
from flatmatch_jax.system.array_files import BROKEN
from flatmatch_jax.types import UserError

VERSION = '1.30.0'  # Of onnxruntime-web, which the tests run.
_CODE = 'ort.wasm.bundle.min.mjs'
_WASM = 'ort-wasm-simd-threaded.wasm'
_ARCHIVE = pathlib.Path(f'onnxruntime-web-{VERSION}.tgz')
_REMEDY = f'run `npm pack onnxruntime-web@{VERSION}` in this folder'
_HERE = pathlib.Path(__file__).parent
_MAX_BYTES = 2**26
_MAX_MODEL = 2**28  # The text of a page must not be longer than a string.


class Runtime(NamedTuple):
  """The files of onnxruntime-web."""

  version: str
  code: bytes
  wasm: bytes


def find(path: str | None) -> Runtime:
  """The package: a folder, an archive, or where npm leaves either here."""
  if path:
    return _read(pathlib.Path(path).expanduser())
  for place in (_ARCHIVE, pathlib.Path('node_modules/onnxruntime-web')):
    if place.exists():
      return _read(place)
  raise UserError(
    f'--page needs the npm package onnxruntime-web; {_REMEDY}, or name it by '
    '--onnxruntime_web.'
  )


def _read(path: pathlib.Path) -> Runtime:
  names = ('package.json', f'dist/{_CODE}', f'dist/{_WASM}')
  try:
    if path.is_dir():
      found = [files.read_bytes(path / name, _MAX_BYTES) for name in names]
    else:
      with tarfile.open(path) as archive:
        found = [
          _content(archive.extractfile(f'package/{name}')) for name in names
        ]
    return Runtime(str(json.loads(found[0])['version']), *found[1:])
  except (KeyError, TypeError, tarfile.TarError, *BROKEN) as error:
    raise UserError(
      f'{path} is not the npm package onnxruntime-web: {error}; {_REMEDY}.'
    ) from None


def _content(file: IO[bytes] | None) -> bytes:
  if file is None:
    raise ValueError('a file in it is a folder')
  return file.read(_MAX_BYTES)


def render(model: bytes, description: dict, runtime: Runtime) -> str:
  """The page, as HTML."""
  if len(model) > _MAX_MODEL:
    raise UserError(
      f'The model has {len(model) / 1e6:.0f} MB, too many for a page (at most '
      f'{_MAX_MODEL / 1e6:.0f}); train a smaller network, or serve --out '
      'model.onnx.'
    )
  page, style, script = (
    (_HERE / name).read_text()
    for name in ('page.html', 'style.css', 'script.js')
  )
  policy = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    f"style-src '{_digest(style)}'; "
    f"script-src '{_digest(script)}' blob: 'wasm-unsafe-eval'"
  )
  # Any other '<' could end the element that it stands in.
  text = json.dumps(description).replace('<', '\\u003c')
  parts = {
    'policy': policy,
    'style': style,
    'version': html.escape(runtime.version),
    'model': _packed(model),
    'wasm': _packed(runtime.wasm),
    'runtime': _packed(runtime.code),
    'description': text,
    'script': script,
  }
  return re.sub(
    '|'.join(f'{{{name}}}' for name in parts),
    lambda match: parts[match[0][1:-1]],
    page,
  )


def _digest(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f'sha256-{base64.b64encode(digest).decode()}'


def _packed(content: bytes) -> str:
  return base64.b64encode(gzip.compress(content, mtime=0)).decode()
