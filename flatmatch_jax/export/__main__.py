"""Writes the model of a run into one file, for use elsewhere.

  python -m flatmatch_jax.export --workdir DIR --out model.onnx

The end of --out chooses the format: .onnx for ONNX Runtime and most others,
.stablehlo for JAX on CPU, CUDA and TPU, .safetensors for the weights by name.
Images go in as uint8 [N, H, W, C], probabilities [N, K] come out. A JSON file
beside it holds the class names and all else that is needed to use it. The file
is first checked against the run on images, and is not written if it disagrees.
With --page page.html also a page that classifies images in a browser, offline.
"""

import functools
import hashlib
import json
import pathlib
import tempfile

import jax
import numpy as np

from flatmatch_jax.data import images as images_lib
from flatmatch_jax.export import formats, web
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir, versions
from flatmatch_jax.system import cli, files, messages
from flatmatch_jax.training import classifier, exported, load
from flatmatch_jax.types import UserError

TOLERANCE = 1e-3  # Of a probability; float32 in another order makes 1e-5.
_IMAGES = 256  # At most, for the check.
_PATHS = ('data_dir', 'labels_file', 'pretrained', 'compilation_cache')


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.export',
    description='Writes the model of a run into one file.',
  )
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument(
    '--out', help=f'file to write; it ends with {", ".join(exported.SUFFIXES)}'
  )
  parser.add_argument('--page', help='page to write, such as page.html')
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument(
    '--images',
    nargs='+',
    metavar='FILE_OR_FOLDER',
    help="check on these; the run's own if left out",
  )
  parser.add_argument(
    '--onnxruntime_web',
    metavar='FOLDER_OR_TGZ',
    help='that npm package, for --page; looked for here if left out',
  )
  args = parser.parse_args()
  _check_arguments(args)
  export(args)


def _check_arguments(args):
  if not (args.out or args.page):
    raise UserError('Nothing to write: give --out model.onnx, or --page.')
  if args.out:
    suffix = pathlib.Path(args.out).suffix.lower()
    if suffix not in exported.SUFFIXES:
      raise UserError(
        f'--out {args.out} must end with {", ".join(exported.SUFFIXES)}, which '
        'chooses the format.'
      )
    files.check_target('--out', args.out)
    files.check_target('--out', f'{args.out}.json')
  if args.page:
    if pathlib.Path(args.page).suffix.lower() not in ('.html', '.htm'):
      raise UserError(f'--page {args.page} must end with .html.')
    files.check_target('--page', args.page)
  if args.page or suffix == '.onnx':
    for package in ('jax2onnx', 'onnx', 'onnxruntime'):
      exported.require(package)


def export(args) -> None:
  run = Workdir(args.workdir)
  trained = load.load_trained(run, args.checkpoint)
  runtime = args.page and web.find(args.onnxruntime_web)
  if args.checkpoint == 'latest':
    load.warn_unfinished(trained.step, trained.config.steps, 'Export')
  images, what = choose_images(run, trained, args.images)
  make_one = functools.cache(
    lambda suffix: make(run, trained, suffix, images, what)
  )
  if args.out:
    path = files.to_path(args.out)
    content, description = make_one(path.suffix.lower())
    # First, so that a file is never without what describes it.
    beside = exported.description_of(path)
    _write('--out', beside, _as_json(description))
    _write('--out', path, content)
    print(f'{path} ({_size(content)}) and {beside.name} are written.')
  if args.page:
    content = web.render(*make_one('.onnx'), runtime).encode()
    _write('--page', args.page, content)
    print(f'{args.page} ({_size(content)}) is written; open it in a browser.')


def choose_images(
  run: Workdir, trained: load.Trained, paths: list[str] | None
) -> tuple[np.ndarray, str]:
  """Images to check on, and what they are."""
  if paths:
    found = _files(paths)[:_IMAGES]
    pixels, unreadable = classifier.of_trained(trained, {}).read(found)
    keep = [row for row in range(len(found)) if row not in unreadable]
    if not keep:
      raise UserError(
        'None of --images can be read as an image, such as '
        f'{found[0]}: {unreadable[0]}.'
      )
    return pixels[keep], 'images given by --images'
  try:
    dataset = load.load_data(trained, None)
  except (UserError, OSError) as error:
    messages.say(
      f'The data of the run cannot be read: {error} The check uses made-up '
      'images; name real ones by --images.'
    )
    return _made_up(trained.dataset['image_shape']), 'made-up images'
  try:
    images, _, what = load.choose_images(run, trained, dataset)
  except UserError:
    images, what = dataset.train_images, 'training'
  index = np.linspace(0, len(images) - 1, min(len(images), _IMAGES))
  return np.asarray(images[index.astype(int)][:]), f'{what} images of the run'


def _files(paths):
  found: list[pathlib.Path] = []
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise UserError(f'--images {path} does not exist.')
    found += images_lib.find(path).images if path.is_dir() else [path]
  if not found:
    raise UserError(
      f'No images in --images {", ".join(paths)}; looked for '
      f'{" ".join(images_lib.EXTENSIONS)}.'
    )
  return found


def _made_up(shape):
  """Squares of random colours under noise."""
  rng, (height, width, channels) = np.random.default_rng(0), shape
  squares = rng.integers(0, 256, (_IMAGES // 4, 4, 4, channels))
  rows, columns = (np.arange(side) * 4 // side for side in (height, width))
  large = squares[:, rows][:, :, columns]
  return np.clip(large + rng.normal(0, 20, large.shape), 0, 255).astype('u1')


def make(
  run: Workdir, trained: load.Trained, suffix: str, images, what: str
) -> tuple[bytes, dict]:
  """A file and its description; UserError if it disagrees with the run."""
  if suffix != '.safetensors':
    trained = _in_float32(trained)
  with jax.default_matmul_precision('highest'):
    expected = classifier.make_run(trained)(images)
  if not np.isfinite(expected).all():
    raise UserError(
      f'The model of {run.path} gives probabilities that are not numbers; try '
      '--checkpoint best.'
    )
  description = describe(run, trained)
  content = formats.encode(suffix, trained, description)
  description |= {'sha256': hashlib.sha256(content).hexdigest()}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / f'model{suffix}'
    path.write_bytes(content)
    exported.description_of(path).write_bytes(_as_json(description))
    with jax.default_matmul_precision('highest'):
      found = classifier.load(path).run(images)
  difference = float(np.abs(found - expected).max())
  if not difference <= TOLERANCE:
    raise UserError(
      f'The {suffix} file disagrees with the run: probabilities of '
      f'{len(images)} {what} differ by up to {difference:.2g}, more than '
      f'{TOLERANCE}. Nothing was written; export another format.'
    )
  messages.say(
    f'The {suffix} file agrees with the run on {len(images)} {what}: '
    f'probabilities differ by at most {difference:.1g}.'
  )
  checked = {'images': len(images), 'of': what, 'difference': difference}
  return content, description | {'checked': checked}


def _in_float32(trained):
  """With the network that computes so, as not every runtime knows others."""
  config = trained.config.copy_and_resolve_references()
  if config.dtype == 'float32':
    return trained
  messages.say(
    f'The run computes in {config.dtype}; the file does in float32, and is '
    'checked against the same weights in float32.'
  )
  config.dtype = 'float32'
  model, _ = load.network(config, trained.dataset)
  return trained._replace(config=config, model=model)


def describe(run: Workdir, trained: load.Trained) -> dict:
  """dataset.json, how to make the input, and where the model comes from."""
  config = as_dict(trained.config)
  for name in _PATHS:  # They say nothing elsewhere, but show names of users.
    config[name] = pathlib.PurePath(config[name]).name
  height, width, channels = trained.dataset['image_shape']
  share = trained.dataset['test_share']
  errors: dict[str, float] = {}
  for row in run.metrics():
    if row['step'] <= trained.step:
      errors |= {
        name: row[key]
        for key, name in (('error', 'test'), ('val_error', 'validation'))
        if key in row
      }
  return trained.dataset | {
    'input': {
      'name': exported.INPUT,
      'content': f'uint8 [N, {height}, {width}, {channels}], '
      + ('grey' if channels == 1 else 'RGB'),
    },
    'output': {
      'name': exported.OUTPUT,
      'content': f'float32 [N, {len(trained.dataset["class_names"])}], in the '
      'order of class_names',
    },
    'resize': {
      'rule': images_lib.RULE,
      'cover': [round(height / share), round(width / share)],
      'centre': [height, width],
      'content': 'Turn the image upright by its EXIF tag, put transparent '
      'parts on white, scale it (bicubic with antialiasing, as Pillow does) '
      'until it just covers [height, width] "cover", and keep "centre".',
    },
    'run': {
      'method': config['method'],
      'model': config['model'],
      'step': trained.step,
      'steps': config['steps'],
      'error_percent': errors,
      'versions': versions(),
      'config': config,
    },
  }


def _as_json(description) -> bytes:
  text = json.dumps(description, indent=2, ensure_ascii=False)
  return f'{text}\n'.encode(errors='surrogateescape')


def _size(content) -> str:
  return f'{len(content) / 1e6:.1f} MB'


def _write(option, path, content):
  try:
    with files.replacing(path) as file:
      file.write(content)
  except OSError as error:
    raise UserError(f'Cannot write {option} {path}: {error}.') from error


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
