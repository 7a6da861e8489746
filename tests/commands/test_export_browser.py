"""The page of a model in a real browser, from the disk."""

import base64
import io
import json
import os
import time

import browser as browser_lib
import numpy as np
from PIL import Image
import pytest
from refusals import check_line
import test_export
from test_export import ODD, call, files, images, workdir

import flatmatch_jax
from flatmatch_jax.data import images as images_lib
from flatmatch_jax.export import web
from flatmatch_jax.types import UserError

__all__ = ['call', 'files', 'images', 'workdir']


def refuse_or_skip(remedy):
  if os.environ.get('CI') == 'true':
    pytest.fail(remedy)
  pytest.skip(remedy)


@pytest.fixture(scope='module')
def runtime():
  """The npm package, where ONNXRUNTIME_WEB says or in the root's folder."""
  try:
    return web.find(os.environ.get('ONNXRUNTIME_WEB'))
  except UserError as error:
    refuse_or_skip(f'{error} Or name it in ONNXRUNTIME_WEB.')


@pytest.fixture(scope='module')
def browser():
  if (program := browser_lib.find()) is None:
    refuse_or_skip('No browser found; install one, such as chromium.')
  with browser_lib.start(program) as browser:
    yield browser


def make_page(path, files, runtime, **changes):
  about = json.loads((files / 'model.onnx.json').read_text()) | changes
  path.write_text(
    web.render((files / 'model.onnx').read_bytes(), about, runtime)
  )
  return path


def wait(browser, expression):
  until = time.monotonic() + 120
  while not (found := browser.evaluate(expression)):
    assert time.monotonic() < until, browser.evaluate('document.body.innerText')
    time.sleep(0.05)
  return found


def open_page(browser, path):
  browser.open(path)
  wait(browser, "!$('status').textContent.startsWith('Loading')")
  assert 'offline' in browser.evaluate("$('status').textContent")


def choose(browser, *paths):
  """As in the dialog that a click opens."""
  root = browser.call('DOM.getDocument')['root']['nodeId']
  node = browser.call('DOM.querySelector', nodeId=root, selector='#files')
  browser.call('DOM.setFileInputFiles', files=list(map(str, paths)), **node)


def drop(browser, *paths):
  data = {
    'items': [],
    'files': list(map(str, paths)),
    'dragOperationsMask': 1,
  }
  for kind in ('dragEnter', 'dragOver', 'drop'):
    browser.call('Input.dispatchDragEvent', type=kind, x=99, y=99, data=data)


RESULTS = """
[...document.querySelectorAll('article')].map(card => [
  card.querySelector('.file').textContent,
  [...card.querySelectorAll('li')].map(row => [
    row.querySelector('span').textContent, row.querySelector('b').textContent,
    row.querySelector('i').style.getPropertyValue('--share')])])
"""


def test_chosen_and_dropped_images_get_the_classes_of_the_run(
  browser, runtime, files, workdir, images, tmp_path
):
  """Names of classes and of files are shown, and do nothing."""
  names = ['a.png', '<img src=x onerror=alert(1)>.png', 'é.png']
  paths = [tmp_path / name for name in names]
  for path, image in zip(paths, images[:3], strict=True):
    Image.fromarray(image[..., 0]).save(path)
  broken = tmp_path / 'broken.jpg'
  broken.write_text('not an image')
  page = make_page(tmp_path / 'page.html', files, runtime)
  browser.look(390, 844)
  open_page(browser, page)
  choose(browser, paths[0], broken)
  wait(browser, "document.querySelectorAll('article').length === 2")
  drop(browser, *paths[1:])
  wait(browser, "document.querySelectorAll('article').length === 4")
  found = dict(browser.evaluate(RESULTS))
  assert found.pop(f'{broken.name}: this browser cannot decode it.') == []
  expected = flatmatch_jax.load(workdir).probabilities(paths)
  assert found.keys() == set(names)
  for name, row in zip(names, expected, strict=True):
    best = np.argsort(-row)[:5]
    assert [shown[0] for shown in found[name]] == [ODD[i] for i in best]
    shares = [float(shown[2].rstrip('%')) / 100 for shown in found[name]]
    np.testing.assert_allclose(shares, row[best], atol=1e-5)
    assert found[name][0][1] == f'{100 * row[best[0]]:.1f}%'
  assert browser.complaints() == []
  # Nothing but its own parts.
  assert all(url.startswith('blob:') for url in browser.requests())
  for width in (390, 1280):
    browser.look(width, 844)
    wide = browser.evaluate('document.documentElement.scrollWidth')
    assert wide <= width


PIXELS = """
(async () => {
  const response = Uint8Array.from(atob('%s'), c => c.charCodeAt(0));
  const found = pixels(await decode(new Blob([response])));
  return [...found];
})()
"""


@pytest.fixture(scope='module')
def colours(browser, runtime, files, tmp_path_factory):
  """A page whose model would see the centre of larger images in colour."""
  path = tmp_path_factory.mktemp('page') / 'page.html'
  resize = {'cover': [20, 30], 'centre': [15, 24]}
  make_page(path, files, runtime, image_shape=[15, 24, 3], resize=resize)
  open_page(browser, path)
  return browser


def seen(browser, image, kind, **options):
  """Bytes that the page makes of a file, and those that Python makes."""
  buffer = io.BytesIO()
  image.save(buffer, kind, **options)
  answer = browser.call(
    'Runtime.evaluate',
    expression=PIXELS % base64.b64encode(buffer.getvalue()).decode(),
    awaitPromise=True,
    returnByValue=True,
  )
  found = np.array(answer['result']['value'], np.uint8).reshape(15, 24, 3)
  upright = images_lib.ImageOps.exif_transpose(Image.open(buffer))
  whole = images_lib.fit(upright, (20, 30, 3))
  return found, whole[2:17, 3:27]


@pytest.mark.parametrize(
  'size', [(30, 20), (24, 15), (60, 40), (301, 97), (97, 301), (7, 5), (30, 99)]
)
def test_pixels_are_those_of_python(colours, size):
  """To the bit, unless Pillow begins with the columns: it may in tall images,
  and rounds in between."""
  width, height = size
  rng = np.random.default_rng(0)
  noise = rng.integers(0, 256, (height, width, 3), np.uint8)
  found, wanted = seen(colours, Image.fromarray(noise), 'PNG')
  most = 1 if height > width else 0
  assert np.abs(found.astype(int) - wanted).max() <= most


def test_photos_are_upright_and_nearly_equal(colours):
  """Decoders of JPEG differ, and blend what is transparent differently."""
  y, x = np.mgrid[:90, :160] / 10
  waves = np.stack([np.sin(x), np.cos(y), np.sin(x + y)], -1)
  photo = Image.fromarray(np.uint8(127 + 120 * waves))
  exif = Image.Exif()
  exif[274] = 6  # To be turned by a quarter.
  found, wanted = seen(colours, photo, 'JPEG', quality=90, exif=exif)
  assert np.abs(found.astype(int) - wanted).max() <= 2
  photo.putalpha(Image.fromarray(np.uint8(255 * (x > 8))))
  found, wanted = seen(colours, photo, 'PNG')
  assert np.abs(found.astype(int) - wanted).max() <= 2


# The package of npm.


def test_what_is_no_package_is_one_line(call, workdir, tmp_path):
  (tmp_path / 'a.tgz').write_bytes(b'none')
  for path in ('a.tgz', 'no.tgz', '.'):
    code, _, stderr = call(
      *('--workdir', workdir, '--page', tmp_path / 'page.html'),
      *('--onnxruntime_web', tmp_path / path),
    )
    assert code == 2
    check_line(stderr, [str(tmp_path / path), 'npm pack onnxruntime-web@'])
  assert [path.name for path in tmp_path.iterdir()] == ['a.tgz']


def test_command_writes_a_page(call, workdir, tmp_path, monkeypatch):
  """Of a package that npm has unpacked here, by another version."""
  monkeypatch.chdir(tmp_path)
  package = tmp_path / 'node_modules' / 'onnxruntime-web'
  (package / 'dist').mkdir(parents=True)
  (package / 'package.json').write_text('{"version": "9.9.9<"}')
  for name in (web._CODE, web._WASM):
    (package / 'dist' / name).write_text('{model}')
  code, stdout, _ = call('--workdir', workdir, '--page', 'page.html')
  assert code == 0
  assert 'page.html' in stdout
  text = (tmp_path / 'page.html').read_text()
  assert 'ONNX Runtime Web 9.9.9&lt;' in text
  assert test_export.ODD[2] not in text  # Its end of a script.
  assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [
    'page.html'
  ]
