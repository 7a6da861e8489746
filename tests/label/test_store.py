"""Files that get their labels: none is lost, whatever happens."""

import errno
import json
import os
import pathlib
import textwrap

import pytest
import runs

from flatmatch_jax.label import journal
from flatmatch_jax.label.store import Store, check_class
from flatmatch_jax.types import UserError


@pytest.fixture
def folder(tmp_path):
  """Six files whose content tells which they are."""
  for name in ('a', 'b', 'sub/a', 'sub/deep/c', 'd', 'e'):
    path = tmp_path / 'photos' / 'unlabeled' / f'{name}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
  return tmp_path / 'photos'


@pytest.fixture
def store(folder):
  store = Store(folder)
  yield store
  store.close()


def tree(folder):
  """All files and folders but the journal, and what is in them."""
  return {
    str(path.relative_to(folder)): path.is_file() and path.read_text()
    for path in sorted(folder.rglob('*'))
    if '.flatmatch_jax' not in path.parts
  }


def reopened(store):
  store.close()
  store.__init__(store.root)
  return store


def give(store, name, *numbers):
  label = store.add_class(name)
  return store.label([(number, label) for number in numbers])


def test_undo_puts_everything_back(store, folder):
  before = tree(folder)
  give(store, 'cat', 0)
  give(store, 'dog', 3, 4)
  store.skip([1])
  assert (folder / 'labeled/cat/a.jpg').read_text() == 'a'
  assert (folder / 'labeled/dog/sub/a.jpg').read_text() == 'sub/a'
  assert (store.pending, store.skipped) == ({2, 5}, {1})
  for left in (3, 5, 6):
    store.undo()
    assert len(store.pending) == left
  assert tree(folder) == before
  assert not store.skipped
  assert not any(store.counts.values())
  with pytest.raises(UserError, match='nothing to undo'):
    store.undo()


def test_another_session_goes_on_and_can_undo(store, folder):
  before = tree(folder)
  give(store, 'zebra', 0)
  give(store, 'cat', 1)
  store.skip([2])
  reopened(store)
  assert store.classes == ['zebra', 'cat']  # Keys stay the same.
  assert store.counts == {'cat': 1, 'zebra': 1}
  assert (len(store.pending), len(store.skipped)) == (3, 1)
  store.undo()
  reopened(store)
  assert (len(store.pending), len(store.skipped)) == (4, 0)
  back = [store.name(n) for _ in range(2) for n in store.undo()]
  assert back == ['b.jpg', 'a.jpg']
  assert store.next(9)[-2:] == [4, 5]  # They are to do again.
  assert tree(folder) == before


def test_an_action_of_ones_own_is_undone(store):
  """Of two tabs each takes back what it did."""
  first, _ = give(store, 'cat', 0)
  give(store, 'dog', 1)
  assert store.undo(first) == [0]
  with pytest.raises(UserError, match='nothing to undo'):
    store.undo(first)
  assert store.counts == {'cat': 0, 'dog': 1}


def test_the_second_of_two_tabs_changes_nothing(store, folder):
  give(store, 'cat', 0)
  action, notes = give(store, 'dog', 0)
  assert action is None
  assert notes == ['a.jpg has been dealt with already.']
  assert store.skip([0]) is None
  assert list((folder / 'labeled').iterdir()) == [folder / 'labeled' / 'cat']


def test_names_that_are_taken_are_left_alone(store, folder):
  taken = folder / 'labeled/cat/a.jpg'
  taken.parent.mkdir(parents=True)
  taken.write_text('older')
  give(store, 'cat', 0)
  assert taken.read_text() == 'older'
  assert (folder / 'labeled/cat/a-2.jpg').read_text() == 'a'
  (folder / 'unlabeled/a.jpg').write_text('newer')
  store.undo()
  assert (folder / 'unlabeled/a.jpg').read_text() == 'newer'
  assert (folder / 'unlabeled/a-2.jpg').read_text() == 'a'


def test_files_that_somebody_removed(store, folder):
  (folder / 'unlabeled/a.jpg').unlink()
  _, notes = give(store, 'cat', 0, 1)
  assert notes == ['a.jpg is gone.']
  assert store.unreadable == {0: 'it is gone'}
  (folder / 'labeled/cat/b.jpg').unlink()
  assert store.undo() == []


def test_skipped_images_come_again(store):
  store.skip([0, 1])
  store.skip([2])
  store.again()
  assert (len(store.pending), store.skipped) == (6, set())


def test_order(store):
  store.reorder([3, 1])
  assert store.next(4) == [3, 1, 0, 2]
  assert store.next(3, shown=[5, 4, 77]) == [5, 4, 3]
  give(store, 'cat', 3)
  assert store.next(2, shown=[3]) == [1, 0]


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('', 'is empty'),
    ('  ', 'is empty'),
    ('cats/dogs', 'slash'),
    ('..\\dogs', 'slash'),
    ('..', 'hidden'),
    ('.cat', 'hidden'),
    ('Thumbs.db', 'hidden'),
    ('two\nlines', 'cannot be shown'),
    ('\0', 'cannot be shown'),
    ('é' * 51, 'longer than 100 bytes'),
  ],
)
def test_class_names_that_are_refused(store, name, reason):
  with pytest.raises(UserError, match=reason):
    store.add_class(name)
  assert not store.classes


def test_classes_of_a_run_that_cannot_be_folders_are_refused(folder):
  with pytest.raises(UserError, match="'cats/dogs' has a slash"):
    Store(folder, ['bird', 'cats/dogs'])


def test_class_names_that_are_one(store):
  assert check_class(' cafe\u0301 ') == 'caf\u00e9'
  assert store.add_class('Cat') == store.add_class('cat') == 0
  assert store.add_class('café') == 1


# Folders.


def test_images_lie_anywhere_if_there_is_no_unlabeled(tmp_path):
  tests = [f'{x}/cat/t.png' for x in ('test', 'val', 'valid', 'validation')]
  for name in ('x.png', 'in/y.JPG', 'labeled/cat/z.png', *tests):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  for name in ('.hidden.png', 'in/text.txt', '.flatmatch_jax/8.png'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  store = Store(tmp_path)
  assert [store.name(n) for n in store.next(9)] == ['in/y.JPG', 'x.png']
  assert store.counts == {'cat': 1}
  assert store.labeled_paths() == [tmp_path / 'labeled/cat/z.png']
  give(store, 'cat', 0)
  assert (tmp_path / 'labeled/cat/in/y.JPG').is_file()
  store.close()


@pytest.mark.parametrize(
  ('names', 'words'),
  [
    (
      ['train/cat/a.jpg'],
      'train has the labels, and .* into .*/labeled.',
    ),
    (['labels.csv'], 'labels.csv has the labels; write new ones there'),
    (['cat/a.jpg', 'dog/a.jpg'], 'has labels in cat, dog, and .* move those'),
  ],
)
def test_labels_from_another_place_are_not_mixed(folder, names, words):
  for name in names:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  with pytest.raises(UserError, match=words):
    Store(folder)


@pytest.mark.parametrize('name', ['nothing', 'text.txt', 'empty'])
def test_folders_without_images(tmp_path, name):
  (tmp_path / 'text.txt').write_text('')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(UserError, match=r'not a folder|no images to label'):
    Store(tmp_path / name)


def test_links_do_not_lead_out(folder, tmp_path):
  outside = tmp_path / 'outside'
  outside.mkdir()
  (outside / 'secret.jpg').write_text('secret')
  (folder / 'unlabeled/file.jpg').symlink_to(outside / 'secret.jpg')
  (folder / 'unlabeled/folder').symlink_to(outside)
  (folder / 'labeled').mkdir()
  (folder / 'labeled/cat').symlink_to(outside)
  before = tree(folder)
  store = Store(folder)
  assert len(store.pending) == 6
  assert store.links == 2
  with pytest.raises(UserError, match='is a link'):
    give(store, 'cat', 0)
  assert tree(folder) == before
  assert os.listdir(outside) == ['secret.jpg']
  store.close()
  (folder / 'unlabeled').rename(tmp_path / 'elsewhere')
  (folder / 'unlabeled').symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(UserError, match='is a link'):
    Store(folder)


@pytest.mark.parametrize(
  'line',
  [
    {'moves': [['../stolen.jpg', 'labeled/cat/mine.jpg']]},
    {'moves': [['/stolen.jpg', 'labeled/cat/mine.jpg']]},
    {'moves': [['unlabeled/x.jpg', '../mine.jpg']]},
    {'moves': [['unlabeled/x.jpg', 'labeled/../../mine.jpg']]},
    {'moves': [['unlabeled/x\0.jpg', 'labeled/cat/mine.jpg']]},
    {'moves': [['unlabeled/x.jpg', 'labeled']]},
    {'moves': [[1, 2]]},
    {'moves': 3},
    {'skip': [None]},
    {'undo': 'x'},
    [],
    'torn',
  ],
  ids=str,
)
def test_journals_of_anyone(folder, tmp_path, line):
  (tmp_path / 'mine.jpg').write_text('mine')
  (folder / 'labeled/cat').mkdir(parents=True)
  (folder / 'labeled/cat/mine.jpg').write_text('mine')
  path = folder / journal.FILE
  path.parent.mkdir()
  text = '{"moves": [["unl' if line == 'torn' else json.dumps(line) + '\n'
  path.write_text(text)
  before = tree(tmp_path)
  store = Store(folder)
  with pytest.raises(UserError, match='nothing to undo'):
    store.undo()
  give(store, 'dog', 0)  # And what is written next can be read.
  reopened(store).undo()
  assert tree(tmp_path) == before
  store.close()


def test_one_process_at_a_time(store, folder):
  with pytest.raises(UserError, match='being labeled by another process'):
    Store(folder)


# What a disk does.


@pytest.mark.parametrize('place', ['write', 'mkdir', 'open', 'replace'])
def test_a_full_disk_changes_nothing(store, folder, monkeypatch, place):
  give(store, 'cat', 0)
  before = tree(folder), (folder / journal.FILE).read_text()

  def full(*args, **_):
    if place == 'write' and len(args[1]) > 9:
      return write(args[0], args[1][:9])  # As much as there is room for.
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  write = os.write
  owner = pathlib.Path if place in ('mkdir', 'replace') else os
  with monkeypatch.context() as patch:
    patch.setattr(owner, place, full)
    if place == 'write':
      patch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left'):
      give(store, 'dog', 1, 2)
  assert tree(folder) == before[0]
  assert store.pending == {1, 2, 3, 4, 5}
  reopened(store)
  assert len(store.pending) == 5
  give(store, 'dog', 0)
  assert store.counts == {'cat': 1, 'dog': 1}


def test_a_disk_that_fills_up_between_two_images(store, folder, monkeypatch):
  replace, left = pathlib.Path.replace, [1]

  def full(*args):
    if not left:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    left.pop()
    return replace(*args)

  before = tree(folder)
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'replace', full)
    with pytest.raises(OSError, match='No space left'):
      give(store, 'dog', 1, 2, 3)
  assert store.pending == {0, 2, 3, 4, 5}
  assert store.counts == {'dog': 1}
  store.undo()
  assert tree(folder) == before


CRASH = """
import os, pathlib, shutil, sys
from flatmatch_jax.label.store import Store

root = pathlib.Path(sys.argv[1])
EVENTS = ('open', 'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir')

def files(folder):
  return sorted(
    path.read_text() for path in folder.rglob('*.jpg') if path.stat().st_size)

def act(store):
  store.label([(0, store.add_class('cat')), (1, store.add_class('dog'))])
  store.undo()
  store.label([(2, 0)])
  store.undo()

def crash(after, folder):
  def hook(event, args):
    nonlocal after
    if event in EVENTS and str(folder) in str(args[0]):
      after -= 1
      if after < 0:
        os._exit(9)
  store = Store(folder)
  sys.addaudithook(hook)
  act(store)
  os._exit(0)

for after in range(100):
  folder = root.parent / f'copy{after}'
  shutil.copytree(root, folder)
  child = os.fork()
  if not child:
    crash(after, folder)
  code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  assert files(folder) == files(root), after
  store = Store(folder)
  everything = sorted(folder.rglob('*.jpg'))
  assert all(path.stat().st_size for path in everything), after
  assert len(store.pending) + sum(store.counts.values()) == len(everything)
  while any(store.counts.values()):
    store.undo()
  assert files(folder / 'unlabeled') == files(root), after
  store.close()
  if not code:
    break
assert code == 0
print(after)
"""


def test_a_crash_anywhere_loses_nothing(folder):
  """The process ends at each of its calls that change files, in turn."""
  done = runs.python('-W', 'ignore', '-c', textwrap.dedent(CRASH), folder)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 10
