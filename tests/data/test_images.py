"""Every kind of file gives the pixels that it shows, or says why not."""

import os
import pathlib
import threading

import jax
import numpy as np
from PIL import Image
import pillow_heif
import pytest

from flatmatch_jax.data import images
from flatmatch_jax.types import UserError

GREY = np.tile(np.linspace(0, 255, 8, dtype=np.uint8), (8, 1))
GREY[:3] = GREY[:3, ::-1]  # Neither mirrored nor turned is it the same.
RGB = np.stack([GREY, GREY.T, 255 - GREY], -1)


def cmyk(pixels):
  return Image.fromarray(pixels).convert('CMYK')


def opaque(pixels):
  return Image.fromarray(pixels).convert('RGBA')


def sixteen_bit(grey):
  return Image.fromarray(grey.astype(np.uint16) * 256 + 255)


def thirty_two_bit(grey):
  return Image.fromarray(grey.astype(np.int32) * 256)


def palette(grey):
  image = Image.fromarray(grey).convert('P')
  assert image.mode == 'P'
  return image


def transparent(grey):
  """Black ink whose alpha makes `grey` on white paper."""
  rgba = np.zeros((*grey.shape, 4), np.uint8)
  rgba[..., 3] = 255 - grey
  return Image.fromarray(rgba)


@pytest.mark.parametrize(
  ('make', 'extension', 'tolerance'),
  [
    (lambda grey: Image.fromarray(grey).convert('RGB'), 'png', 0),
    (lambda grey: Image.fromarray(grey).convert('LA'), 'png', 0),
    (palette, 'gif', 0),
    (sixteen_bit, 'png', 0),
    (thirty_two_bit, 'tif', 0),
    (transparent, 'png', 1),
    (Image.fromarray, 'webp', 0),
    (Image.fromarray, 'jpg', 4),
  ],
)
@pytest.mark.parametrize('channels', [1, 3])
def test_modes_and_formats_mean_the_same_grey_image(
  tmp_path, make, extension, tolerance, channels
):
  path = tmp_path / f'image.{extension}'
  options = {'jpg': {'quality': 100}, 'webp': {'lossless': True}}
  make(GREY).save(path, **options.get(extension, {}))
  found = images.read(path, (8, 8, channels))
  assert (found.shape, found.dtype) == ((8, 8, channels), np.uint8)
  difference = found.astype(int) - GREY[..., None]
  assert np.abs(difference).max() <= tolerance


@pytest.mark.parametrize(
  ('make', 'extension', 'tolerance'),
  [
    (Image.fromarray, 'png', 0),
    (Image.fromarray, 'bmp', 0),
    (Image.fromarray, 'tiff', 0),
    (opaque, 'webp', 0),
    (Image.fromarray, 'jpeg', 24),
    (cmyk, 'jpg', 24),
  ],
)
def test_modes_and_formats_mean_the_same_colours(
  tmp_path, make, extension, tolerance
):
  smooth = np.asarray(Image.fromarray(RGB).resize((64, 64)))
  path = tmp_path / f'image.{extension}'
  options = {'webp': {'lossless': True}}
  best = {'quality': 100, 'subsampling': 0}
  make(smooth).save(path, **options.get(extension, best))
  found = images.read(path, (64, 64, 3))
  assert np.abs(found.astype(int) - smooth).max() <= tolerance


def test_sixteen_bit_colours_keep_the_upper_eight(tmp_path):
  """Pillow cannot write them; these are the chunks of such a PNG."""
  import struct
  import zlib

  rows = (RGB.astype('>u2') * 256 + 7).astype('>u2')
  raw = b''.join(b'\0' + row.tobytes() for row in rows)

  def chunk(kind, content):
    crc = zlib.crc32(kind + content)
    return (
      struct.pack('>I', len(content)) + kind + content + struct.pack('>I', crc)
    )

  (tmp_path / 'a.png').write_bytes(
    b'\x89PNG\r\n\x1a\n'
    + chunk(b'IHDR', struct.pack('>IIBBBBB', 8, 8, 16, 2, 0, 0, 0))
    + chunk(b'IDAT', zlib.compress(raw))
    + chunk(b'IEND', b'')
  )
  found = images.read(tmp_path / 'a.png', (8, 8, 3))
  np.testing.assert_array_equal(found, RGB)


@pytest.mark.parametrize('mode', ['P', 'L', 'RGB'])
def test_a_colour_that_means_transparent_shows_white(tmp_path, mode):
  image = Image.new(mode, (8, 8), 0)
  image.paste(Image.new(mode, (4, 8), 7), (4, 0))
  nothing = (0, 0, 0) if mode == 'RGB' else 0
  image.save(tmp_path / 'a.png', transparency=nothing)
  found = images.read(tmp_path / 'a.png', (8, 8, 3))
  assert np.all(found[:, :4] == 255)
  assert not np.any(found[:, 4:] == 255)


def test_alpha_of_half_is_half_white(tmp_path):
  Image.new('RGBA', (8, 8), (255, 0, 0, 128)).save(tmp_path / 'a.png')
  found = images.read(tmp_path / 'a.png', (8, 8, 3))
  assert found[0, 0].tolist() == [255, 127, 127]


# What EXIF calls orientation, and how the camera's pixels lie.
TURNED = {
  2: lambda x: x[:, ::-1],
  3: lambda x: x[::-1, ::-1],
  4: lambda x: x[::-1],
  6: lambda x: np.rot90(x, 1),
  8: lambda x: np.rot90(x, -1),
}


@pytest.mark.parametrize('orientation', TURNED)
@pytest.mark.parametrize('extension', ['png', 'jpg', 'webp'])
def test_photos_are_turned_upright(tmp_path, orientation, extension):
  exif = Image.Exif()
  exif[0x0112] = orientation
  pixels = np.ascontiguousarray(TURNED[orientation](GREY))
  path = tmp_path / f'turned.{extension}'
  options = {'lossless': True} if extension == 'webp' else {'quality': 100}
  Image.fromarray(pixels).save(path, exif=exif, **options)
  found = images.read(path, (8, 8, 1))
  assert np.abs(found[..., 0].astype(int) - GREY).max() <= 4


def heic(path, exif=None):
  """The grey image, losslessly, as telephones write it."""
  image = pillow_heif.from_pillow(Image.fromarray(GREY).convert('RGB'))
  image.save(path, format='HEIF', quality=-1, chroma=444, exif=exif)


@pytest.mark.parametrize('name', ['a.heic', 'misnamed.jpg'])
def test_heic_is_read_if_its_decoder_is_there(tmp_path, monkeypatch, name):
  heic(tmp_path / name)
  found = images.read(tmp_path / name, (8, 8, 1))
  assert np.abs(found[..., 0].astype(int) - GREY).max() <= 2
  with pytest.raises(Image.UnidentifiedImageError):
    Image.open(tmp_path / name)  # Pillow is as it was for others.
  before = images.decoders()
  monkeypatch.setattr(images, 'pillow_heif', None)
  assert images.decoders() != before  # So that the cache notices.
  with pytest.raises(ValueError, match=r'HEIC; .* pip install pillow-heif'):
    images.read(tmp_path / name, (8, 8, 1))


def test_heic_is_turned_once(tmp_path):
  """By its decoder; the tag that says so again is not followed."""
  exif = Image.Exif()
  exif[0x0112] = 6
  heic(tmp_path / 'a.heic', exif.tobytes())
  found = images.read(tmp_path / 'a.heic', (8, 8, 1))[..., 0]
  np.testing.assert_array_equal(found, np.rot90(GREY, -1))


def test_heic_that_is_cut_off_is_no_image(tmp_path):
  heic(tmp_path / 'a.heic')
  whole = (tmp_path / 'a.heic').read_bytes()
  for size in (12, 100, len(whole) - 20):
    (tmp_path / 'a.heic').write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r'\w'):
      images.read(tmp_path / 'a.heic', (8, 8, 1))


@pytest.mark.parametrize('size', [(8, 8), (17, 8), (8, 17), (1, 1), (100, 3)])
@pytest.mark.parametrize('shape', [(8, 8, 1), (32, 32, 3), (8, 12, 3)])
def test_odd_sizes_are_fitted(tmp_path, size, shape):
  path = tmp_path / 'image.png'
  Image.new('RGB', size, (200, 200, 200)).save(path)
  found = images.read(path, shape)
  assert found.shape == shape
  assert np.all(found == 200)


@pytest.mark.parametrize('axis', [0, 1])
def test_the_centre_is_kept(tmp_path, axis):
  """An image twice as wide loses its left and right quarters."""
  wide = np.zeros((8, 16), np.uint8)
  wide[:, 4:12] = 255
  Image.fromarray(np.moveaxis(wide, 0, axis)).save(tmp_path / 'wide.png')
  assert np.all(images.read(tmp_path / 'wide.png', (8, 8, 1)) == 255)


def test_scaling_is_bicubic_over_the_whole_centre(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  expected = Image.fromarray(pixels).resize(
    (10, 10), Image.Resampling.BICUBIC, box=(0, 5, 30, 35)
  )
  found = images.read(tmp_path / 'a.png', (10, 10, 3))
  np.testing.assert_array_equal(found, np.asarray(expected))


def test_large_photos_are_decoded_at_a_fraction_of_their_size(
  tmp_path, monkeypatch
):
  coarse = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
  photo = Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC)
  photo.save(tmp_path / 'a.jpg', quality=95)
  sizes = []
  fit = images.fit

  def note(image, shape):
    sizes.append(image.size)
    return fit(image, shape)

  monkeypatch.setattr(images, 'fit', note)
  found = images.read(tmp_path / 'a.jpg', (30, 30, 3))
  assert sizes == [(160, 120)]  # An eighth would be below four times 30.
  with Image.open(tmp_path / 'a.jpg') as whole:
    expected = fit(whole, (30, 30, 3))
  assert np.abs(found.astype(int) - expected).max() <= 2


# What cannot be read.


def test_programs_are_not_started_for_a_file(tmp_path):
  """Pillow would call Ghostscript for PostScript under any name."""
  path = tmp_path / 'image.png'
  path.write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n')
  with pytest.raises(ValueError, match='not one of PNG, JPEG'):
    images.read(path, (8, 8, 3))


# Many files.


def save_many(folder, number):
  folder.mkdir(exist_ok=True)
  paths = []
  for i in range(number):
    paths.append(folder / f'{i:04}.png')
    Image.new('L', (8, 8), i % 256).save(paths[-1])
  return paths


def test_rows_are_those_of_the_paths(tmp_path, monkeypatch):
  monkeypatch.setattr(images, '_BLOCK', 16)
  paths = save_many(tmp_path, 50)
  paths[7].write_bytes(b'')
  paths[40].write_bytes(b'no')
  out = np.zeros((50, 4, 4, 1), np.uint8)
  complaints = images.read_into(out, paths)
  assert sorted(complaints) == [7, 40]
  good = np.setdiff1d(np.arange(50), [7, 40])
  np.testing.assert_array_equal(out[good, 0, 0, 0], good)


def test_files_are_read_in_parallel(tmp_path, monkeypatch):
  """Each of two waits for the other; alone it would wait in vain."""
  monkeypatch.setattr(images, '_THREADS', 2)
  meeting = threading.Barrier(2, timeout=20)
  read = images.read

  def wait_and_read(path, shape):
    meeting.wait()
    return read(path, shape)

  monkeypatch.setattr(images, 'read', wait_and_read)
  out = np.zeros((2, 4, 4, 1), np.uint8)
  assert images.read_into(out, save_many(tmp_path, 2)) == {}


def test_each_file_advances(tmp_path):
  out, calls = np.zeros((3, 4, 4, 1), np.uint8), []
  images.read_into(out, save_many(tmp_path, 3), lambda: calls.append(1))
  assert len(calls) == 3


def test_too_many_images_for_the_memory():
  with pytest.raises(ValueError, match=r'GiB.*image_size'):
    images.empty(2**50, (32, 32, 3))


# Finding.


def test_find_is_sorted_deep_and_blind_for_hidden_files(tmp_path):
  for name in (
    'b/2.PNG',
    'a.jpg',
    'b/1.webp',
    '.hidden.png',
    '._a.jpg',
    '.git/x.png',
    'Thumbs.db',
    '__MACOSX/b.png',
    'b/notes.txt',
  ):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
  found = images.find(tmp_path)
  names = [str(path.relative_to(tmp_path)) for path in found.images]
  assert names == ['a.jpg', 'b/1.webp', 'b/2.PNG']
  assert found.others == {tmp_path / 'b/notes.txt': 'not an image by its name'}


def test_find_follows_links_but_not_in_circles(tmp_path):
  folder, elsewhere = tmp_path / 'folder', tmp_path / 'elsewhere'
  for path in (folder / 'inner', elsewhere):
    path.mkdir(parents=True)
    (path / 'a.png').touch()
  (elsewhere / 'back').symlink_to(folder)
  (folder / 'inner' / 'up').symlink_to(folder)
  (folder / 'inner' / 'top').symlink_to(tmp_path)
  (folder / 'linked').symlink_to(elsewhere)
  (folder / 'nowhere.png').symlink_to(tmp_path / 'missing')
  found = images.find(folder, above=[tmp_path])
  names = [str(path.relative_to(folder)) for path in found.images]
  assert names == ['inner/a.png', 'linked/a.png']
  assert list(found.others) == [folder / 'nowhere.png']


@pytest.mark.parametrize('inner', [False, True])
def test_folder_without_permission_is_named(tmp_path, monkeypatch, inner):
  """An inner one is passed over; root may read all, so it is pretended."""
  secret = tmp_path / 'secret' if inner else tmp_path
  secret.mkdir(exist_ok=True)
  (tmp_path / 'x.png').touch()
  iterdir = pathlib.Path.iterdir

  def refuse(path):
    if path == secret:
      raise PermissionError(13, 'Permission denied')
    return iterdir(path)

  monkeypatch.setattr(pathlib.Path, 'iterdir', refuse)
  if inner:
    found = images.find(tmp_path)
    assert found.others == {secret: 'Permission denied'}
    assert found.images == [tmp_path / 'x.png']
  else:
    with pytest.raises(UserError, match='cannot be read: Permission denied;'):
      images.find(tmp_path)


def test_find_does_not_open_pipes(tmp_path):
  os.mkfifo(tmp_path / 'pipe.png')
  found = images.find(pathlib.Path(tmp_path))
  assert found.others == {tmp_path / 'pipe.png': 'not a regular file'}


@pytest.mark.parametrize('number', [1, 3, 100])
def test_room_for_images_is_what_the_device_uses(number):
  """A second copy of STL-10 would be three gigabytes."""
  room = images.empty(number, (5, 7, 3))
  assert room.shape == (number, 5, 7, 3)
  placed = jax.device_put(room, jax.devices('cpu')[0])
  assert placed.unsafe_buffer_pointer() == room.ctypes.data
