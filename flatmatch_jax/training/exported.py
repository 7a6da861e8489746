"""Models in a file: `flatmatch_jax.export` writes them, this reads them.

Beside MODEL stands MODEL.json: dataset.json of the run, how an image becomes
the input, the run with its config, and the checksum of MODEL.
"""

from collections.abc import Callable
import hashlib
import importlib.util
import pathlib
from typing import Any

from flax import traverse_util
import jax
import jax.export
import ml_collections
import numpy as np

from flatmatch_jax.system import array_files, files
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import load
from flatmatch_jax.types import UserError

SUFFIXES = ('.onnx', '.stablehlo', '.safetensors')
INPUT, OUTPUT = 'images', 'probabilities'
FEW, MANY = 16, 256  # Batches for which a program is compiled.

# What comes with the package, by name: NAME.safetensors and its JSON.
SHIPPED = pathlib.Path(__file__).parents[1] / 'weights'

_MAX_BYTES = 2**31  # As much as ONNX can hold.

# uint8 [N, H, W, C] -> [N, K], of any N.
Run = Callable[[np.ndarray], np.ndarray]


def find(name: str) -> pathlib.Path | None:
  """The file of a model that is in a file or comes with the package."""
  path = pathlib.Path(name).expanduser()
  shipped = {path.stem: path for path in SHIPPED.glob('*.safetensors')}
  if name in shipped and not path.exists():
    return shipped[name]
  model = path.parent / path.stem
  described = path.suffix == '.json' and model.suffix.lower() in SUFFIXES
  if described and not path.is_dir():
    raise UserError(f'{path} only describes a model; name the model: {model}.')
  if path.suffix.lower() not in SUFFIXES or path.is_dir():
    return None
  if not path.is_file():
    names = ', '.join(sorted(shipped))
    raise UserError(
      f'There is no {path}.'
      + (names and f' Models that come with the package: {names}.')
    )
  return path


def description_of(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f'{path.name}.json')


def read(path: pathlib.Path) -> tuple[dict[str, Any], Run | load.Trained]:
  """The content of MODEL.json, and the model; of .safetensors its weights.

  UserError if the file is not the one that its JSON describes.
  """
  description = _read_description(path)
  try:
    content = files.read_bytes(path, _MAX_BYTES)
  except (OSError, ValueError) as error:
    raise UserError(f'{path} cannot be read: {error}.') from None
  if hashlib.sha256(content).hexdigest() != description['sha256']:
    raise UserError(
      f'{path} is not the file that {description_of(path).name} describes: '
      'its checksum differs. Put back both, or export again.'
    )
  suffix = path.suffix.lower()
  if suffix == '.safetensors':
    return description, _read_safetensors(path, description)
  open_ = open_onnx if suffix == '.onnx' else open_stablehlo
  try:
    return description, open_(content)
  except UserError:
    raise
  except Exception as error:  # Each of them has its own.
    reason = ' '.join(str(error).split())[:200]
    raise UserError(f'{path} cannot be used here: {reason}.') from error


def _read_description(path):
  beside = description_of(path)
  try:
    description = files.read_json(beside)
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(
      f'{beside} cannot be read: {reason}. It belongs to {path.name}: keep '
      'them together, under these names.'
    ) from None
  load.check_dataset(beside, description)
  match description:
    case {'sha256': str(), 'run': {'config': {}, 'step': int()}}:
      return description
  raise UserError(
    f'{beside} does not describe an exported model; put back the one that '
    '`python -m flatmatch_jax.export` wrote.'
  )


def _read_safetensors(path, description) -> load.Trained:
  try:
    config = ml_collections.ConfigDict(description['run']['config'])
    config_lib.check_fields(config)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(
      f'The config in {description_of(path)} cannot be used: {error}'
    ) from None
  model, shapes = load.network(config, description)
  flat = traverse_util.flatten_dict(shapes, sep='/')
  with array_files.open_arrays(str(path)) as arrays:
    wrong = [
      name
      for name in flat.keys() | arrays.keys()
      if name not in arrays
      or name not in flat
      or arrays[name].shape != flat[name].shape
    ]
    if wrong:
      raise UserError(
        f'{path} does not hold the weights of {config.model}: {min(wrong)} is '
        'missing, unknown or of another shape. Export again.'
      )
    values = {name: arrays[name].read() for name in flat}
  variables = traverse_util.unflatten_dict(values, sep='/')
  step = description['run']['step']
  return load.Trained(config, description, step, model, variables)


def require(package: str, extra: str = 'export') -> None:
  """UserError that names the extra, where a package is not installed."""
  if importlib.util.find_spec(package) is None:
    raise UserError(
      f'This needs the package {package}; install the extra "{extra}": '
      f"pip install -e '.[{extra}]'"
    )


def open_onnx(content: bytes) -> Run:
  """By ONNX Runtime, on this machine's CPU."""
  require('onnxruntime')
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # Errors.
  session = onnxruntime.InferenceSession(
    content, options, providers=['CPUExecutionProvider']
  )
  call = lambda images: session.run([OUTPUT], {INPUT: images})[0]

  def run(images):
    parts = [images[i : i + MANY] for i in range(0, len(images), MANY)]
    return np.concatenate([call(part) for part in parts or [images]])

  return run


def open_stablehlo(content: bytes) -> Run:
  """By JAX, on whatever devices it has; compiled for few images or many."""
  call = jax.jit(jax.export.deserialize(bytearray(content)).call)

  def run(images):
    size = FEW if len(images) <= FEW else MANY
    parts = []
    for start in range(0, max(len(images), 1), size):
      part = images[start : start + size]
      missing = [(0, size - len(part)), (0, 0), (0, 0), (0, 0)]
      parts.append(np.asarray(call(np.pad(part, missing)))[: len(part)])
    return np.concatenate(parts)

  return run
