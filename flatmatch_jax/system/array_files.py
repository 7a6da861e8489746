"""Arrays by name in .npz and .safetensors files, read without trusting them.

Nothing is unpickled. Shapes come from the headers; an array is read only when
asked for, and by then its size is known to fit the file.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import json
import math
import pathlib
from typing import Any, BinaryIO, NamedTuple
import zipfile
import zlib

import jax.numpy as jnp
import numpy as np

from flatmatch_jax.types import UserError

_MAX_HEADER = 2**24  # A large ViT's takes 2**16 bytes.
_MAX_RATIO = 1032  # Deflate packs at most so many bytes into one.
_DTYPES: dict[str, Any] = {
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
}
# What zipfile, zlib, numpy and json raise at damaged, encrypted, too large or
# too deep files.
BROKEN = (
  OSError,
  EOFError,
  ValueError,
  RuntimeError,
  MemoryError,
  zipfile.BadZipFile,
  zlib.error,
)


class Stored(NamedTuple):
  """An array in a file."""

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]  # As float32.


@contextlib.contextmanager
def open_arrays(path: str) -> Iterator[dict[str, Stored]]:
  """The arrays of a file by name, valid inside the `with`.

  Whatever is wrong with the file, there or in a `read`, is a UserError.
  """
  if not pathlib.Path(path).is_file():
    raise UserError(f'{path} is not a file; name a file of weights.')
  try:
    with open(path, 'rb') as file:
      if file.read(4) == b'PK\x03\x04':
        with zipfile.ZipFile(file) as archive:
          yield {
            name: Stored(shape, functools.partial(_read_npy, archive, name))
            for name, shape in check_npz(archive).items()
          }
      else:
        yield _safetensors(file)
  except UserError:
    raise
  except BROKEN as error:
    raise UserError(
      f'{path} cannot be read: {error}. Expected is a whole .npz file of plain '
      'arrays, or a .safetensors file; pickles are not opened.'
    ) from error


def check_npz(archive: zipfile.ZipFile) -> dict[str, tuple[int, ...]]:
  """The shapes of arrays by name; ValueError if one is not what it claims.

  Numpy would make room for an array before it looks whether it is there.
  """
  shapes = {}
  for info in archive.infolist():
    name = info.filename.removesuffix('.npy')
    if name == info.filename:
      raise ValueError(f'{name!r} is not an array; write the file by np.savez')
    if info.file_size > _MAX_RATIO * info.compress_size:
      raise ValueError(f'{name!r} claims to be larger than it can be')
    with archive.open(info) as member:
      shape, _, dtype = npy_header(name, member)
      if dtype.hasobject:
        raise ValueError(
          f'{name!r} is an array of Python objects, which are not loaded; save '
          'numbers, or text of a fixed width'
        )
      _check_size(name, shape, dtype, info.file_size - member.tell())
    shapes[name] = shape
  return shapes


def npy_header(name, member):
  """Of version 1.0, which numpy writes: at most 2**16 bytes."""
  try:
    if np.lib.format.read_magic(member) == (1, 0):
      return np.lib.format.read_array_header_1_0(member)
  except Exception as error:  # It is a Python literal: anything may come.
    raise ValueError(f'the header of {name!r} is malformed') from error
  raise ValueError(f'{name!r} has an unusual .npy version')


def _read_npy(archive, name):
  with archive.open(f'{name}.npy') as member:
    return _floats(name, np.lib.format.read_array(member, allow_pickle=False))


def _safetensors(file: BinaryIO) -> dict[str, Stored]:
  """Length of the header, header in JSON, bytes."""
  file.seek(0)
  length = int.from_bytes(file.read(8), 'little')
  start = 8 + length
  room = file.seek(0, 2) - start
  if length > _MAX_HEADER or room < 0:
    raise ValueError(f'a header of {length} bytes does not fit')
  file.seek(8)
  header = json.loads(file.read(length))
  if not isinstance(header, dict):
    raise ValueError('its header is not a table')
  header.pop('__metadata__', None)
  arrays = {}
  for name, entry in header.items():
    code, shape, begin, end = _checked(name, entry)
    if end > room:
      raise ValueError(f'{name} ends beyond the file, which may be cut off')
    if code in _DTYPES:
      _check_size(name, shape, np.dtype(_DTYPES[code]), end - begin)
    place = start + begin, end - begin
    read = functools.partial(_read_tensor, file, name, *place, code, shape)
    arrays[name] = Stored(shape, read)
  return arrays


def to_safetensors(
  arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> bytes:
  """A .safetensors file of float32 arrays."""
  header: dict[str, Any] = {'__metadata__': metadata}
  content, end = [], 0
  for name, array in sorted(arrays.items()):
    content.append(np.asarray(array, '<f4').tobytes())
    begin, end = end, end + len(content[-1])
    header[name] = {
      'dtype': 'F32',
      'shape': list(np.shape(array)),
      'data_offsets': [begin, end],
    }
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)  # Arrays begin at multiples of 8 bytes.
  return b''.join([len(text).to_bytes(8, 'little'), text, *content])


def _checked(name, entry):
  match entry:
    case {
      'dtype': str(code),
      'shape': [*shape],
      'data_offsets': [begin, end],
    } if (
      all(type(n) is int and n >= 0 for n in (*shape, begin, end))
      and begin <= end
    ):
      return code, tuple(shape), begin, end
  raise ValueError(f'the entry of {name} is malformed')


def _read_tensor(file, name, start, size, code, shape):
  if code not in _DTYPES:
    raise ValueError(f'{name} has dtype {code}, not {", ".join(_DTYPES)}')
  file.seek(start)
  values = np.frombuffer(file.read(size), _DTYPES[code])
  return _floats(name, values.reshape(shape))


def _check_size(name, shape, dtype, size):
  # In Python's integers, which do not overflow.
  if math.prod(shape) * dtype.itemsize != size:
    raise ValueError(f'{name!r} does not have the size of its shape {shape}')


def _floats(name, values):
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise ValueError(f'{name} has dtype {values.dtype}, not a float')
  values = values.astype(np.float32)
  if not np.isfinite(values).all():
    raise ValueError(f'{name} holds NaN or infinity')
  return values
