"""Faults: disks that are full, or cannot be written."""

import contextlib
import os
import pathlib

import lab as lab_lib
import runs

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load


def size(folder):
  return sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())


def size_of_latest(workdir):
  return size(workdir / 'checkpoints' / str(runs.saved_steps(workdir)[-1]))


def assert_full(workdir, found, before):
  """The last line tells; what was saved can be read."""
  code, stderr = found
  assert code == 2, stderr
  line = stderr.splitlines()[-1]
  assert line.startswith('error: Cannot write '), stderr
  assert 'the same command resumes' in line, stderr
  assert 'Traceback' not in stderr, stderr
  assert runs.saved_steps(workdir)[-1] >= before
  assert int(load.load_run(Workdir(workdir)).state.step) >= before


def fill(lab, workdir, shares, run_with_room):
  """Runs with room for these shares of a checkpoint, then with enough."""
  failed = 0
  for share in shares:
    before = runs.saved_steps(workdir)[-1]
    found = run_with_room(int(share * size_of_latest(workdir)))
    if found[0]:
      assert_full(workdir, found, before)
      failed += 1
  assert failed, 'There was always enough room.'
  lab.finish(workdir)
  return failed, 'a line, the checkpoint before whole; then the same bits'


@contextlib.contextmanager
def small_disk(folder):
  folder.mkdir()
  lab_lib.mount('-t', 'tmpfs', '-o', 'size=24m', 'tmpfs', folder)
  try:
    yield
  finally:
    lab_lib.unmount(folder)


def full_disk(lab):
  """A tmpfs in which another file leaves little room."""
  if not lab_lib.can_mount():
    raise lab_lib.NotTriedError('mounting is not permitted here')
  random, disk = lab.random('full_disk'), lab.folder / 'disk'
  filler = disk / 'filler'
  with small_disk(disk):
    workdir = lab.half('disk/run')

    def run_with_room(room):
      status = os.statvfs(disk)
      free = status.f_bavail * status.f_frsize
      filler.write_bytes(bytes(max(0, free - room)))
      found = lab.run(workdir)
      filler.unlink()
      return found

    shares = [0, *random.uniform(0, 1, 2), *random.uniform(1, 3, 2)]
    return fill(lab, workdir, shares, run_with_room)


def limited_files(lab):
  """RLIMIT_FSIZE, as a quota: no mount is needed."""
  workdir = lab.half('limited')
  return fill(
    lab,
    workdir,
    lab.random('limited').uniform(0, 0.2, 2),
    lambda room: lab.hurt(workdir, 'disk', room),
  )


@contextlib.contextmanager
def made_read_only(folder):
  """Even root cannot write to a mount; others are stopped by permissions."""
  if lab_lib.can_mount():
    lab_lib.mount('--bind', folder, folder)
    lab_lib.mount('-o', 'remount,ro,bind', folder)
    undo = lambda: lab_lib.unmount(folder)
  elif os.getuid():
    folder.chmod(0o555)
    undo = lambda: folder.chmod(0o755)
  else:
    raise lab_lib.NotTriedError('root may write everywhere but to mounts')
  try:
    yield
  finally:
    undo()


def read_only(lab):
  workdir = lab.half('read_only/run')
  folder = workdir.parent
  before = runs.hashes(folder)
  paths = [workdir, folder / 'new', pathlib.Path('/proc/run')]
  with made_read_only(folder):
    for path in paths:
      lab_lib.assert_refused(lab.run(path), 'Cannot write', str(path))
  assert runs.hashes(folder) == before
  lab.finish(workdir)
  way = 'a read-only mount' if lab_lib.can_mount() else 'permissions'
  return len(paths), f'a line, all still there; then the same bits ({way})'
