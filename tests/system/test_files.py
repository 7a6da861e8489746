"""Files that are whole or the old ones, on disks of all kinds."""

import errno
import os
import pathlib

import pytest

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import files
from flatmatch_jax.types import UserError


def replace(path, content, error=None):
  with files.replacing(path) as file:
    file.write(content)
    if error:
      raise error


def test_a_file_is_on_disk_before_it_has_its_name_and_its_folder_after(
  tmp_path, monkeypatch
):
  order = []
  fsync, rename = os.fsync, pathlib.Path.replace

  def flush(descriptor):
    fsync(descriptor)
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    order.append('folder' if path == tmp_path else 'file')

  monkeypatch.setattr(os, 'fsync', flush)
  monkeypatch.setattr(
    pathlib.Path, 'replace', lambda *args: (rename(*args), order.append('name'))
  )
  replace(tmp_path / 'a', b'1')
  assert order == ['file', 'name', 'folder']


@pytest.mark.parametrize('error', [OSError, KeyboardInterrupt])
def test_a_file_is_whole_or_the_old_one(error, tmp_path):
  replace(tmp_path / 'a', b'first')
  with pytest.raises(error):
    replace(tmp_path / 'a', b'second', error)
  assert (tmp_path / 'a').read_bytes() == b'first'
  assert os.listdir(tmp_path) == ['a']


def test_a_link_in_the_way_is_not_followed(tmp_path):
  other, path = tmp_path / 'other', tmp_path / 'a'
  other.write_text('of somebody')
  path.with_name(f'a.{os.getpid()}.tmp').symlink_to(other)
  replace(path, b'mine')
  assert other.read_text() == 'of somebody'
  assert path.read_text() == 'mine'
  assert not path.is_symlink()


@pytest.fixture
def refuse(monkeypatch):
  """Makes files, or folders, give an error when they are flushed."""
  fsync = os.fsync

  def refuse(number, folders):
    def flush(descriptor):
      if os.path.isdir(f'/proc/self/fd/{descriptor}') == folders:
        raise OSError(number, os.strerror(number))
      fsync(descriptor)

    monkeypatch.setattr(os, 'fsync', flush)

  return refuse


@pytest.mark.parametrize('number', [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folders_that_cannot_be_flushed_are_no_error(number, tmp_path, refuse):
  refuse(number, folders=True)
  replace(tmp_path / 'a', b'1')
  assert (tmp_path / 'a').read_bytes() == b'1'


@pytest.mark.parametrize(
  ('number', 'folders'), [(errno.EIO, True), (errno.ENOSPC, False)]
)
def test_a_broken_or_full_disk_is_a_line(number, folders, tmp_path, refuse):
  workdir = Workdir(str(tmp_path / 'runs' / 'first'))
  workdir.write('a.json', {'error': 3.5})
  refuse(number, folders)
  words = (
    rf'Cannot write .*a\.json: {os.strerror(number)}.*same command resumes'
  )
  with pytest.raises(UserError, match=words):
    workdir.write('a.json', {'error': 2.5})
  assert folders or workdir.read('a.json') == {'error': 3.5}


def test_errors_of_the_program_stay_as_they_are(tmp_path):
  with pytest.raises(IndexError), files.writing(tmp_path):
    raise IndexError


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('[' + '1,' * 50 + '1]', 'larger than 100 bytes'),
    ('[' * 99, 'nested too deeply|Expecting'),
  ],
)
def test_json_is_bounded(text, words, tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_MAX_JSON', 100)
  (tmp_path / 'a.json').write_text(text)
  with pytest.raises(ValueError, match=words):
    files.read_json(tmp_path / 'a.json')
