"""Hurts real runs in every way we know, and looks whether anything is lost.

  make faults, or python tests/faults.py [--seed N] [--only kill,full_disk]

After each fault the finished run equals an undisturbed one bit for bit, or a
line says what is wrong and everything is still there. Prints a table, and ends
with 1 if something was lost. A few of these are part of `make test`.
"""

import argparse
from concurrent import futures
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import conftest  # noqa: F401  Compiles fast.
import numpy as np
from PIL import Image
import processes
import runs

from flatmatch_jax import data, program
from flatmatch_jax.workdir import Workdir

LONG = ('--config.steps=60',)
DAY = 24 * 60 * 60


class Lab:
  """An undisturbed run, and what it takes to disturb others like it."""

  def __init__(self, folder, finished, seed, args=(), config=runs.CONFIG):
    self.folder, self.finished, self.seed = folder, finished, seed
    self._args, self._config = args, config
    self._lock = threading.Lock()
    self.state = program.load_run(Workdir(finished)).state
    self.steps = int(self.state.step)

  def random(self, name):
    return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

  def command(self, workdir):
    return runs.command(workdir, *self._args, config=self._config)

  def stop(self, workdir, place, count):
    """A process of the run that has stopped at a place of tests/hurt.py."""
    return runs.start_and_stop(self.folder, self.command(workdir), place, count)

  def hurt(self, workdir, place, count):
    """The whole process, hurt from inside; its exit code and stderr."""
    return runs.go_on(self.stop(workdir, place, count))

  def run(self, workdir):
    done = runs.run(self.folder, self.command(workdir))
    return done.returncode, done.stderr

  def half(self, name):
    """A copy of a run that was killed after three checkpoints or so."""
    with self._lock:
      whole = self.finished.with_name(f'{self.finished.name}-half')
      if not whole.exists():
        runs.go_on(self.stop(whole, 'step', 11), signal.SIGKILL)
    return pathlib.Path(shutil.copytree(whole, self.folder / name))

  def finish(self, workdir):
    """Goes on to the end, and compares every bit; what was said."""
    code, stderr = self.run(workdir)
    assert code == 0, stderr
    runs.assert_same_run(workdir, self.finished, self.state, self.steps)
    return stderr


def assert_refused(found, *words):
  """A line, and nothing was begun."""
  code, stderr = found
  assert code == 2, stderr
  assert stderr.startswith('error: '), stderr
  assert stderr.count('\n') == 1, stderr
  assert all(word in stderr for word in words), stderr


# Signals.


def kill(lab, workdir, random, kind):
  """SIGKILL at a random moment, after a random step, or during a write."""
  if kind == 'moment':
    process = runs.start(lab.folder, lab.command(workdir))
    time.sleep(random.uniform(0, 8))
  else:
    most = {'step': 3, 'write': 30}[kind]
    process = lab.stop(workdir, kind, random.integers(1, most + 1))
  code, stderr = runs.go_on(process, signal.SIGKILL)
  assert code in (0, -signal.SIGKILL), stderr
  return code != 0


def kills(lab, times=24):
  random, workdir = lab.random('kills'), lab.folder / 'kills'
  kinds = ('write', 'step', 'moment')
  killed = [kill(lab, workdir, random, kinds[n % 3]) for n in range(times)]
  lab.finish(workdir)
  assert sum(killed) >= 20, 'The run was over too early.'
  return sum(killed), f'the same bits; {sum(killed[::3])} fell in a write'


def ask_to_stop(lab, workdir, number, place, count=1):
  """SIGTERM or Ctrl-C: what was computed is saved."""
  code, stderr = runs.go_on(lab.stop(workdir, place, count), number)
  assert code == 128 + number, stderr
  assert 'Traceback' not in stderr, stderr
  assert f'step {runs.saved_steps(workdir)[-1]} is saved' in stderr, stderr


def stops(lab, number):
  name = number.name.lower()
  random, workdir = lab.random(name), lab.folder / name
  places = {'compile': 1, 'step': 3, 'evaluate': 1, 'write': 12}
  for place, most in places.items():
    ask_to_stop(lab, workdir, number, place, random.integers(1, most + 1))
  lab.finish(workdir)
  return len(places), 'saved and said so; the same bits'


# Disks.


def can_mount():
  """Whether this process is in a namespace of mounts of its own."""
  return bool(os.environ.get('FAULTS_MAY_MOUNT'))


def mount(*args):
  subprocess.run(['mount', *map(str, args)], check=True)


def size(folder):
  return sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())


def assert_full(workdir, found, before):
  """The last line tells; what was saved can be read."""
  code, stderr = found
  assert code == 2, stderr
  line = stderr.splitlines()[-1]
  assert line.startswith('error: Cannot write '), stderr
  assert 'the same command goes on' in line, stderr
  assert 'Traceback' not in stderr, stderr
  assert runs.saved_steps(workdir)[-1] >= before
  assert int(program.load_run(Workdir(workdir)).state.step) >= before


def full_disk(lab, times=5):
  random = lab.random('full_disk')
  disk = lab.folder / 'disk'
  disk.mkdir()
  if can_mount():
    mount('-t', 'tmpfs', '-o', 'size=24m', 'tmpfs', disk)
  workdir = lab.half('disk/run')
  filler, failed = disk / 'filler', 0
  for _ in range(times):
    before = runs.saved_steps(workdir)[-1]
    one = size(workdir / 'checkpoints' / str(before))
    free = int(
      random.choice([0, random.uniform(0, 1), random.uniform(0, 2)]) * one
    )
    if can_mount():
      status = os.statvfs(disk)
      room = status.f_bavail * status.f_frsize - free
      filler.write_bytes(bytes(max(0, room)))
      found = lab.run(workdir)
      filler.unlink()
    else:
      found = lab.hurt(workdir, 'disk', free // 10)
    if found[0]:
      assert_full(workdir, found, before)
      failed += 1
  assert failed
  lab.finish(workdir)
  way = 'a tmpfs, filled' if can_mount() else 'RLIMIT_FSIZE'
  return failed, f'a line, the checkpoint whole; then the same bits ({way})'


@contextlib.contextmanager
def made_read_only(folder):
  """Even root cannot write to a mount; others are stopped by permissions."""
  if can_mount():
    mount('--bind', folder, folder)
    mount('-o', 'remount,ro,bind', folder)
    yield
    subprocess.run(['umount', str(folder)], check=True)
  else:
    folder.chmod(0o555)
    yield
    folder.chmod(0o755)


def read_only(lab):
  workdir = lab.half('read_only/run')
  folder = workdir.parent
  before = runs.hashes(folder)
  paths = [pathlib.Path('/proc/run')]
  if can_mount() or os.getuid():
    paths += [workdir, folder / 'new']
  with made_read_only(folder):
    for path in paths:
      assert_refused(lab.run(path), 'Cannot write', str(path))
  assert runs.hashes(folder) == before
  lab.finish(workdir)
  way = 'a read-only mount' if can_mount() else 'permissions'
  return len(paths), f'a line, all still there; then the same bits ({way})'


# Checkpoints.


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
    back = f'Going on from step {previous} ' in said
    assert back or f'Going on from step {latest} ' in said, said
    assert said.count(' is damaged (') == (back and torn is not None), said
    if back and torn is not None:
      assert runs.hashes(workdir / 'damaged' / str(latest)) == torn
    fell_back += back
    shutil.rmtree(workdir)
  return times, f'the same bits; {fell_back} fell back and said so'


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
  after = runs.hashes(workdir)
  assert {k: v for k, v in after.items() if k != '.lock'} == {
    k: v for k, v in torn.items() if k != '.lock'
  }
  for path, content in before.items():
    path.write_bytes(content)
  lab.finish(workdir)
  return 1, 'a line, all still there; put back, the same bits'


# Data, other processes, clocks.


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


def change_data(lab, kind, make):
  """A file of the data is torn, or another one is in its place."""
  random, folder = lab.random(kind), lab.folder / kind
  (folder / 'data').mkdir(parents=True)
  data_dir, file = make(folder / 'data')
  size = ',image_size=8' if kind == 'folder' else ''
  config = f'--config={runs.ROOT}/configs/{kind}.py:method=flatmatch_e{size}'
  args = (*LONG, f'--config.data_dir={data_dir}')
  finished = folder / 'finished'
  done = runs.run(lab.folder, runs.command(finished, *args, config=config))
  assert done.returncode == 0, done.stderr
  own = Lab(lab.folder, finished, lab.seed, args, config)
  workdir = own.half(f'{kind}/run')
  before, whole = runs.hashes(workdir), file.read_bytes()
  middle = len(whole) // 2 + int(random.integers(16))
  flipped = bytes([*whole[:middle], whole[middle] ^ 64, *whole[middle + 1 :]])
  for torn in (flipped, whole[:middle], b''):
    file.write_bytes(torn)
    code, stderr = own.run(workdir)
    assert code == 2, stderr
    assert stderr.splitlines()[-1].startswith('error: '), stderr
    after = runs.hashes(workdir)
    assert after | {'.lock': ''} == before | {'.lock': ''}
  file.write_bytes(whole)
  own.finish(workdir)
  return 3, 'a line, all still there; put back, the same bits'


def two_runs(lab):
  """The second is refused, readers are not."""
  workdir = lab.folder / 'two'
  first = lab.stop(workdir, 'step', 9)
  before = runs.hashes(workdir)
  for _ in range(2):
    assert_refused(lab.run(workdir), 'in use', f'process {first.pid} on ')
  assert runs.hashes(workdir) == before
  read = ['-m', 'flatmatch_jax.evaluate', '--workdir', workdir]
  done = runs.run(lab.folder, map(str, read))
  assert done.returncode == 0, done.stderr
  code, stderr = runs.go_on(first)
  assert code == 0, stderr
  runs.assert_same_run(workdir, lab.finished, lab.state, lab.steps)
  return 2, 'refused in a line; the first ended with the same bits'


def one_of_two(lab):
  """Kills the process that coordinates, then the other; the rest must end."""
  whole, workdir = lab.folder / 'pair-whole', lab.folder / 'pair'
  env = processes.environment(lab.folder)
  for ended in processes.run(2, lab.command(whole), env):
    assert ended.returncode == 0, ended.stderr
  for number, step in ((0, 10), (1, 30)):
    with processes.started(2, lab.command(workdir), env) as group:
      group.wait_for(0, f'step {step}/')
      group.popen[number].kill()
      survivor = group.wait()[1 - number]
    assert survivor.returncode > 0 or survivor.returncode == -signal.SIGABRT
  for ended in processes.run(2, lab.command(workdir), env):
    assert ended.returncode == 0, ended.stderr
  state = program.load_run(Workdir(whole)).state
  runs.assert_same_run(workdir, whole, state, lab.steps)
  return 2, 'the other ended too; started again, the bits of an unhurt pair'


def clock_jump(lab, workdir, seconds):
  code, said = lab.hurt(workdir, 'clock', seconds)
  assert code == 0, said
  assert not re.search(r'-\d+ day|-\d+:|-\d+ (s|images)', said), said
  runs.assert_same_run(workdir, lab.finished, lab.state, lab.steps)


def clock_jumps(lab):
  jumps = (-3600, -20000 * DAY, 10000 * DAY)
  for number, seconds in enumerate(jumps):
    clock_jump(lab, lab.half(f'clock-{number}'), seconds)
  return len(jumps), 'the same bits; no negative times'


FAULTS = {
  'SIGKILL, again and again in one run': kills,
  'SIGTERM': lambda lab: stops(lab, signal.SIGTERM),
  'Ctrl-C': lambda lab: stops(lab, signal.SIGINT),
  'one of two processes killed': one_of_two,
  'full disk': full_disk,
  'read-only workdir': read_only,
  'truncated latest checkpoint': lambda lab: damage(lab, truncate, 6),
  'bits flipped in the latest checkpoint': lambda lab: damage(
    lab, flip_bits, 10
  ),
  'deleted latest checkpoint': lambda lab: damage(lab, delete, 1),
  'all checkpoints damaged': damage_all,
  'dataset file damaged, .npz': lambda lab: change_data(lab, 'npz', make_npz),
  'dataset file damaged, folder': lambda lab: change_data(
    lab, 'folder', make_images
  ),
  'two runs on one workdir': two_runs,
  'clock jumps': clock_jumps,
}


def attempt(name, lab):
  """A row of the table, and whether nothing was lost."""
  try:
    tried, outcome = FAULTS[name](lab)
  except Exception:
    traceback.print_exc()
    return f'| {name} | | LOST: see above |', False
  row = f'| {name} | {tried} | {outcome} |'
  print(row, file=sys.stderr, flush=True)  # It takes long.
  return row, True


def main():
  parser = argparse.ArgumentParser(description='Hurts real runs.')
  parser.add_argument('--seed', type=int, default=time.time_ns() % 10**6)
  parser.add_argument('--only', default='', help='words of the faults to try')
  args = parser.parse_args()
  print(f'python tests/faults.py --seed {args.seed}', flush=True)
  chosen = [name for name in FAULTS if args.only in name]
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    finished = folder / 'finished'
    done = runs.run(folder, runs.command(finished, *LONG))
    assert done.returncode == 0, done.stderr
    lab = Lab(folder, finished, args.seed, LONG)
    with futures.ThreadPoolExecutor(2) as pool:
      rows = list(pool.map(lambda name: attempt(name, lab), chosen))
  print('| fault | times tried | outcome |\n|---|---|---|')
  for row, _ in rows:
    print(row)
  return not all(kept for _, kept in rows)


if __name__ == '__main__':
  # Mounts of our own: none is left behind, and no rights are needed.
  unshare = ['unshare', '--map-root-user', '--mount']
  if not can_mount() and not subprocess.call([*unshare, 'true']):
    os.environ['FAULTS_MAY_MOUNT'] = 'yes'
    os.execvp('unshare', [*unshare, sys.executable, *sys.argv])
  sys.exit(main())
