"""Checkpoints: which are kept, and that damage to any file is found out."""

import json
import logging
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax.run import checkpoint
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.checksum import checksums
from flatmatch_jax.system import messages, sharding
from flatmatch_jax.types import UserError

ERRORS = {1: 9.0, 2: 5.0, 3: 7.0, 4: 8.0}  # Steps 2, 3 and 4 are kept.


def make_state(step):
  """Arrays of all kinds that states have; random, so that none is packed."""
  key = jax.random.key(step)
  return {
    'kernel': jax.random.normal(key, (3, 16, 8)),
    'half': jax.random.normal(key, (40,), jnp.bfloat16),
    'flags': jax.random.bernoulli(key, 0.5, (9,)),
    'step': jnp.int32(step),
    'rng': key,
    'none': (),
  }


def bits(state):
  raw = state | {'rng': jax.random.key_data(state['rng'])}
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(raw)]


def save(directory, errors):
  checkpoints = Checkpoints(directory)
  for step, error in errors.items():
    checkpoints.save(step, make_state(step), {'seconds': 0.5 * step}, error)
  checkpoints.close()


def restored_step(directory, which='latest', read_only=True):
  """The step that is read, after a look at all its bits."""
  state, notes = Checkpoints(directory, read_only).restore(make_state(0), which)
  step = int(state['step'])
  assert bits(state) == bits(make_state(step))
  assert notes['seconds'] == 0.5 * step
  return step


def contents(directory):
  return {
    path.relative_to(directory): path.read_bytes()
    for path in sorted(directory.rglob('*'))
    if path.is_file()
  }


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
  directory = tmp_path_factory.mktemp('sound') / 'checkpoints'
  save(directory, ERRORS)
  return directory


@pytest.fixture
def directory(sound, tmp_path):
  shutil.copytree(sound, tmp_path / 'checkpoints')
  return tmp_path / 'checkpoints'


@pytest.mark.parametrize(
  ('errors', 'kept', 'best'),
  [
    ({1: 9.0, 2: 5.0, 3: 7.0, 4: 8.0, 5: 6.0}, [2, 4, 5], 2),
    ({1: 5.0, 2: None, 3: None, 4: None}, [1, 3, 4], 1),
    ({1: 9.0, 2: 8.0, 3: 7.0}, [2, 3], 3),
    ({1: None, 2: 9.0, 3: None, 4: 9.5, 5: None}, [2, 4, 5], 2),
    ({1: 5.0, 2: 5.0, 3: 6.0, 4: 6.0}, [2, 3, 4], 2),
  ],
)
def test_policy_of_checkpoints(tmp_path, errors, kept, best):
  save(tmp_path / 'checkpoints', errors)
  assert Checkpoints(tmp_path / 'checkpoints').steps() == kept
  assert restored_step(tmp_path / 'checkpoints') == max(errors)
  assert restored_step(tmp_path / 'checkpoints', 'best') == best


def test_a_step_without_an_error_is_no_cause_to_warn(tmp_path, monkeypatch):
  """In a program that has not silenced Orbax, such as a notebook."""
  lines = []
  handler = logging.Handler()
  handler.emit = lambda record: lines.append(record.getMessage())
  logger = logging.getLogger('absl')
  monkeypatch.setattr(logger, 'handlers', [handler])
  level = logger.level
  for number in (logging.WARNING, logging.CRITICAL):  # Neither is changed.
    logger.setLevel(number)
    save(tmp_path / str(number), {1: None})
    assert logger.level == number
  logger.setLevel(level)
  assert lines == []


def test_what_is_silenced_by_the_root_stays_so(monkeypatch):
  """As under absl's `app.run`, for which Orbax's logger has no level."""
  logger = logging.getLogger('of a library')
  monkeypatch.setattr(logging.root, 'level', logging.CRITICAL)
  with messages.errors_only(logger.name):
    assert not logger.isEnabledFor(logging.ERROR)
  assert logger.level == logging.NOTSET


# Checksums.


def test_checksum_sees_every_bit():
  words = np.random.default_rng(0).integers(0, 2**32, 6, np.uint32)
  flipped = [
    words ^ np.where(np.arange(6) == place, np.uint32(1 << bit), 0)
    for place in range(6)
    for bit in range(32)
  ]
  found = {
    checksums({'x': jnp.asarray(w, jnp.uint32)})['x'] for w in [words, *flipped]
  }
  assert len(found) == 1 + 6 * 32


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    ([1.5, -1.5], [-1.5, 1.5]),
    ([0.0, 0.0], [-0.0, -0.0]),
    ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]),
    ([True, False], [False, True]),
  ],
)
def test_checksum_sees_exchanged_numbers(one, other):
  assert checksums(jnp.array(one)) != checksums(jnp.array(other))


def test_checksum_sees_exchanged_arrays():
  a, b = jnp.arange(4.0), jnp.ones(4)
  assert checksums([a, b]) != checksums([b, a])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'uint8', 'bool'])
def test_checksum_on_the_host_is_that_of_a_device(dtype):
  """Without compiling; the array has no simple layout."""
  array = np.random.RandomState(0).randn(3, 5, 7).astype(jnp.dtype(dtype))
  array = array.transpose(2, 0, 1)
  assert checksums({'x': array}) == checksums({'x': jnp.asarray(array)})


def test_checksum_does_not_depend_on_devices():
  mesh = sharding.make_mesh()
  state = {'x': jax.random.normal(jax.random.key(0), (8, 4))}
  for place in (sharding.replicated(mesh), sharding.over_batch(mesh)):
    assert checksums(jax.device_put(state, place)) == checksums(state)


# Damage.


def truncate(path, random):
  path.write_bytes(path.read_bytes()[: random.integers(path.stat().st_size)])


def flip_a_bit(path, random):
  data = bytearray(path.read_bytes())
  data[random.integers(len(data))] ^= 1 << random.integers(8)
  path.write_bytes(data)


def delete(path, random):
  del random
  path.unlink()


@pytest.mark.parametrize('hurt', [truncate, flip_a_bit, delete])
def test_damage_to_any_file_is_found_or_harmless(directory, sound, hurt):
  """What is read is what was saved, of this step or of the one before."""
  random = np.random.default_rng(0)
  fell_back = 0
  for path in sorted((directory / '4').rglob('*')):
    if path.is_dir():
      continue
    whole = path.read_bytes()
    hurt(path, random)
    fell_back += restored_step(directory) == 3
    path.write_bytes(whole)
  assert fell_back >= 4
  assert contents(directory) == contents(sound)


def tear(folder):
  """Cuts the files of the arrays in half."""
  for path in folder.rglob('d/*'):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_wrong_state_in_sound_files_is_found(directory, capsys):
  """As when memory failed: every file is what Orbax wrote."""
  shutil.rmtree(directory / '4' / 'state')
  shutil.copytree(directory / '3' / 'state', directory / '4' / 'state')
  assert restored_step(directory) == 3
  assert '(its checksum is wrong)' in capsys.readouterr().err


def test_damaged_one_is_kept_aside_and_saved_again(directory, capsys):
  for _ in range(2):
    damaged = directory / '4'
    tear(damaged)
    before = contents(damaged)
    assert restored_step(directory, read_only=False) == 3
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    aside = sorted((directory.parent / 'damaged').iterdir())[-1]
    assert 'step 4 is damaged' in said
    assert f'kept as {aside}; that of step 3 is used' in said
    assert contents(aside) == before
    assert not damaged.exists()
    save(directory, {4: 8.0})
    assert restored_step(directory) == 4
  assert len(list((directory.parent / 'damaged').iterdir())) == 2


def test_readers_move_nothing(directory, capsys):
  tear(directory / '4')
  before = contents(directory.parent)
  assert restored_step(directory) == 3
  assert 'left as it is; that of step 3 is used' in capsys.readouterr().err
  assert contents(directory.parent) == before


@pytest.mark.parametrize('read_only', [True, False])
def test_nothing_is_changed_if_all_are_damaged(directory, read_only):
  for step in (2, 3, 4):
    tear(directory / str(step))
  before = contents(directory.parent)
  with pytest.raises(UserError, match='only damaged') as error:
    restored_step(directory, read_only=read_only)
  message = str(error.value)
  assert '\n' not in message
  assert all(f'{step}: ' in message for step in (2, 3, 4))
  assert 'another --workdir' in message
  assert contents(directory.parent) == before


def test_damaged_best_is_not_replaced_by_another(directory):
  tear(directory / '2')
  assert restored_step(directory) == 4
  with pytest.raises(UserError, match=r'best asked for.*take the latest'):
    restored_step(directory, 'best')


def test_older_one_with_torn_notes_does_not_stop_saving(directory):
  (directory / '3' / 'metrics' / 'metrics').write_text('{"error"')
  assert restored_step(directory, read_only=False) == 4
  save(directory, {5: 9.0})
  assert restored_step(directory) == 5
  assert Checkpoints(directory).steps() == [2, 4, 5]


def test_changed_notes_are_damage(directory):
  """Seconds and errors count as well."""
  for item, name in (
    ('notes/metadata', 'seconds'),
    ('metrics/metrics', 'error'),
  ):
    path = directory / '4' / item
    whole = path.read_text()
    content = json.loads(whole)
    path.write_text(json.dumps(content | {name: content[name] + 1}))
    assert restored_step(directory) == 3
    path.write_text(whole)


def test_one_of_an_earlier_version_is_not_called_damaged(directory):
  path = directory / '4' / 'notes' / 'metadata'
  notes = json.loads(path.read_text())
  del notes['crc32'], notes['checksums']
  notes['crc32'] = checkpoint._crc32(notes)
  path.write_text(json.dumps(notes))
  with pytest.raises(UserError, match='saved by an earlier version'):
    restored_step(directory, read_only=False)


def test_leftovers_and_empty_folders_are_harmless(directory):
  """Of a write that was killed, or of a disk that lost it."""
  shutil.copytree(directory / '3', directory / '5.orbax-checkpoint-tmp')
  assert restored_step(directory) == 4
  (directory / '6').mkdir()
  assert restored_step(directory) == 4
  assert restored_step(directory, read_only=False) == 4
  save(directory, {5: 9.0, 6: 9.5})
  assert sorted(path.name for path in directory.iterdir()) == ['2', '5', '6']


def test_deleted_ones_are_not_missed(directory):
  shutil.rmtree(directory / '4')
  assert restored_step(directory) == 3
  shutil.rmtree(directory)
  assert Checkpoints(directory).restore(make_state(0)) is None


def test_reader_follows_a_run_that_goes_on(directory, monkeypatch):
  """What is listed may be deleted before it is read."""
  steps = Checkpoints.steps
  listed = [[1]]
  monkeypatch.setattr(
    Checkpoints, 'steps', lambda self: listed.pop() if listed else steps(self)
  )
  assert restored_step(directory) == 4


# Disks that are full.


def test_failed_save_is_a_line_and_the_one_before_is_whole(directory):
  """The thread that writes fails; who looks after it gets the error."""
  before = contents(directory)
  checkpoints = Checkpoints(directory)

  def save_and_look():
    checkpoints.save(5, make_state(5), {'seconds': 2.5}, 3.0)
    for _ in range(1000):
      time.sleep(0.01)
      checkpoints.check()

  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
  try:
    with pytest.raises(UserError, match='too large') as error:
      save_and_look()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert str(directory) in str(error.value)
  assert 'the same command resumes' in str(error.value)
  left = contents(directory)
  assert {path: left[path] for path in before} == before
  assert restored_step(directory) == 4
