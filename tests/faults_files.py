"""Faults: checkpoints and data that are torn, changed or gone."""

import os
import shutil

import numpy as np
from PIL import Image
import runs

from flatmatch_jax import data


def some_file(random, folder):
  files = sorted(p for p in folder.rglob('*') if p.is_file())
  return files[random.integers(len(files))]


def truncate(random, checkpoint):
  path = some_file(random, checkpoint)
  os.truncate(path, random.integers(path.stat().st_size))


def flip_bits(random, checkpoint):
  """One to eight bits, mostly of the largest files: there the arrays are."""
  for _ in range(random.integers(1, 9)):
    path = some_file(random, checkpoint)
    if random.random() < 0.5:
      files = (p for p in checkpoint.rglob('*') if p.is_file())
      path = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    path.write_bytes(content)


def delete(random, checkpoint):
  del random
  shutil.rmtree(checkpoint)


def damage(lab, hurt, times):
  """Hurts the latest checkpoint; it is used, if unharmed, or the one before."""
  random, fell_back = lab.random(hurt.__name__), 0
  for number in range(times):
    workdir = lab.half(f'{hurt.__name__}-{number}')
    *_, previous, latest = runs.saved_steps(workdir)
    checkpoint = workdir / 'checkpoints' / str(latest)
    hurt(random, checkpoint)
    torn = runs.hashes(checkpoint) if checkpoint.exists() else None
    said = lab.finish(workdir)
    back = f'Resuming from step {previous} ' in said
    assert back or f'Resuming from step {latest} ' in said, said
    assert said.count(' is damaged (') == (back and torn is not None), said
    if back and torn is not None:
      assert runs.hashes(workdir / 'damaged' / str(latest)) == torn
    fell_back += back
    shutil.rmtree(workdir)
  return times, f'the same bits; {fell_back} went back to the one before'


def damage_all(lab):
  workdir = lab.half('damage-all')
  before = {}
  for step in runs.saved_steps(workdir):
    path = workdir / 'checkpoints' / str(step) / 'notes' / 'metadata'
    before[path] = path.read_bytes()
    path.write_bytes(path.read_bytes()[:-1])
  torn = runs.hashes(workdir)
  code, stderr = lab.run(workdir)
  assert code == 2, stderr
  assert 'error: ' in stderr.splitlines()[-1], stderr
  assert 'has only damaged checkpoints' in stderr, stderr
  assert_untouched(workdir, torn)
  for path, content in before.items():
    path.write_bytes(content)
  lab.finish(workdir)
  return 1, 'a line, all still there; put back, the same bits'


def assert_untouched(workdir, before):
  """The lock of a killed run may go."""
  assert runs.hashes(workdir) | {'.lock': ''} == before | {'.lock': ''}


# Data.


def make_npz(folder):
  """The digits as a user's own file."""
  digits = data.load('digits')
  arrays = {
    'labeled_images': digits.train_images[:100],
    'labeled_labels': digits.train_labels[:100],
    'unlabeled_images': digits.train_images[100:500],
    'test_images': digits.test_images[:100],
    'test_labels': digits.test_labels[:100],
  }
  path = folder / 'digits.npz'
  np.savez(path, **arrays)
  return path, path


def make_images(folder):
  """And as files, of which one is named."""
  digits = data.load('digits')
  for number, (image, label) in enumerate(
    zip(digits.train_images[:300], digits.train_labels[:300], strict=True)
  ):
    part = ('labeled', 'unlabeled', 'test')[number % 3]
    path = folder / part / ('' if part == 'unlabeled' else str(label))
    path.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[..., 0]).save(path / f'{number}.png')
  return folder, folder / 'unlabeled' / '1.png'


def change_data(lab, kind, make, arg):
  """A file of the data is torn, or another one is in its place.

  `arg` chooses what runs, behind the name of the config's file.
  """
  random, folder = lab.random(kind), lab.folder / kind
  (folder / 'data').mkdir(parents=True)
  data_dir, file = make(folder / 'data')
  own = lab.other(
    f'{kind}/finished',
    f'--config.data_dir={data_dir}',
    config=f'--config={runs.ROOT}/configs/{kind}.py:{arg}',
  )
  workdir = own.half(f'{kind}/run')
  before, whole = runs.hashes(workdir), file.read_bytes()
  middle = len(whole) // 2 + int(random.integers(16))
  flipped = bytes([*whole[:middle], whole[middle] ^ 64, *whole[middle + 1 :]])
  for torn in (flipped, whole[:middle], b''):
    file.write_bytes(torn)
    code, stderr = own.run(workdir)
    assert code == 2, stderr
    assert stderr.splitlines()[-1].startswith('error: '), stderr
    assert_untouched(workdir, before)
  file.write_bytes(whole)
  own.finish(workdir)
  return 3, 'a line, all still there; put back, the same bits'
