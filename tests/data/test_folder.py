"""A folder of the user's images is a dataset, or the error says what to do."""

import os
import pathlib
import shutil

import numpy as np
from PIL import Image
import pytest

from flatmatch_jax import data
from flatmatch_jax.data import cache, images
from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError


def save(path, value=0, size=(10, 12)):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new('RGB', size, (value, value, value)).save(path)


@pytest.fixture
def root(tmp_path):
  """Two classes of 2 and 3, four unlabeled, two for testing."""
  root = tmp_path / 'data'
  for number, name in enumerate(
    ('cat/b.png', 'cat/deep/a.png', 'dog/1.png', 'dog/2.png', 'dog/3.png')
  ):
    save(root / 'labeled' / name, 10 + number)
  for number, name in enumerate(('a.png', 'x/y/b.png', 'x/c.bmp', 'z.webp')):
    save(root / 'unlabeled' / name, 20 + number)
  save(root / 'test' / 'dog' / '1.png', 31)
  save(root / 'test' / 'cat' / '1.png', 30)
  return root


@pytest.fixture
def decoded(monkeypatch):
  """Names of the files that were read."""
  names = []
  read = images.read

  def note(path, shape):
    names.append(path.name)
    return read(path, shape)

  monkeypatch.setattr(images, 'read', note)
  return names


def load(root, size=8):
  return data.load('folder', root, image_size=size)


def values(pixels):
  return pixels[:, 0, 0, 0].tolist()


def stored(root):
  (file,) = (root / cache.FOLDER).iterdir()
  return file


def test_rows_are_labeled_then_unlabeled_by_path(root, capsys):
  dataset = load(str(root))
  assert dataset.name == 'folder'
  assert dataset.class_names == ('cat', 'dog')
  assert dataset.train_images.shape == (9, 8, 8, 3)
  assert dataset.train_images.dtype == np.uint8
  assert values(dataset.train_images)[:8] == [10, 11, 12, 13, 14, 20, 22, 21]
  assert dataset.train_labels.tolist() == [0, 0, 1, 1, 1, -1, -1, -1, -1]
  assert dataset.train_paths[1:6] == (
    'labeled/cat/deep/a.png',
    'labeled/dog/1.png',
    'labeled/dog/2.png',
    'labeled/dog/3.png',
    'unlabeled/a.png',
  )
  assert values(dataset.test_images) == [30, 31]
  assert dataset.test_labels.tolist() == [0, 1]
  assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
  assert (
    'labeled: cat 2, dog 3 (unbalanced); 4 unlabeled; 2 test.'
    in capsys.readouterr().err
  )


def test_test_is_optional(root):
  shutil.rmtree(root / 'test')
  dataset = load(root)
  assert dataset.test_images.shape == (0, 8, 8, 3)
  assert dataset.test_labels.shape == (0,)


def test_test_may_lack_a_class(root, capsys):
  shutil.rmtree(root / 'test' / 'cat')
  assert load(root).test_labels.tolist() == [1]
  assert '1 test, none of cat.' in capsys.readouterr().err


def test_balanced_counts_and_many_classes_are_one_line(root, capsys):
  (root / 'labeled' / 'dog' / '3.png').unlink()
  load(root)
  assert 'labeled: cat 2, dog 2; 4' in capsys.readouterr().err
  for number in range(20):
    save(root / 'labeled' / f'{number:02}' / 'a.png')
  load(root)
  line = 'labeled: 22 classes of 1 to 2 images (unbalanced); 4 unlabeled'
  assert line in capsys.readouterr().err


# Errors.


def no_labeled(root):
  (root / 'labeled').rename(root / 'labelled')


def one_class(root):
  shutil.rmtree(root / 'labeled' / 'cat')
  shutil.rmtree(root / 'test')


def unreadable_class(root):
  save(root / 'labeled' / 'bird' / 'a.png')
  (root / 'labeled' / 'bird' / 'a.png').write_bytes(b'')


def beside_classes(root):
  save(root / 'labeled' / 'stray.jpg')


def other_test_class(root):
  save(root / 'test' / 'bird' / 'a.png')


def empty_test(root):
  shutil.rmtree(root / 'test')
  (root / 'test' / 'cat').mkdir(parents=True)


@pytest.mark.parametrize(
  ('spoil', 'match'),
  [
    (no_labeled, r'has only one folder of images, labelled/, .*labeled/CLASS'),
    (one_class, r"labeled has 1 class \('dog'\); .*at least two"),
    (unreadable_class, r'1 of 3 classes has no readable image.*: bird; add'),
    (beside_classes, r'stray\.jpg lies directly in labeled/.*CLASS'),
    (other_test_class, r"'bird' of .*test is not in .*labeled.*: cat, dog;"),
    (empty_test, r'test holds no readable image.*num_val'),
    (shutil.rmtree, r'data is not a folder.*--config\.data_dir'),
  ],
)
def test_what_cannot_be_trained_on_is_refused(root, spoil, match):
  spoil(root)
  with pytest.raises(UserError, match=match) as caught:
    load(root)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('nothing', ['', None])
def test_data_dir_is_needed(nothing):
  with pytest.raises(UserError, match=r'empty.*--config\.data_dir=DIR'):
    load(nothing)


def test_file_that_vanishes_is_named(root, monkeypatch):
  find = images.find

  def find_and_lose(*args):
    found = find(*args)
    found.images[0].unlink()
    return found

  monkeypatch.setattr(images, 'find', find_and_lose)
  with pytest.raises(UserError, match=r'cannot be read: .*b\.png'):
    load(root)


# Files that are skipped.


def test_unreadable_files_are_named_and_skipped(root, capsys):
  save(root / 'labeled' / 'cat' / 'broken.png')
  (root / 'labeled' / 'cat' / 'broken.png').write_bytes(b'nothing')
  whole = (root / 'unlabeled' / 'a.png').read_bytes()
  (root / 'unlabeled' / 'a.png').write_bytes(whole[:-30])
  (root / 'unlabeled' / 'notes.txt').write_text('to do')
  (root / 'labeled' / 'README').write_text('ours')
  (root / 'unlabeled' / '.DS_Store').touch()
  for _ in range(2):  # Decoded, and from the cache.
    dataset = load(root)
    assert values(dataset.train_images)[:-1] == [10, 11, 12, 13, 14, 22, 21]
    assert dataset.train_labels.tolist() == [0, 0, 1, 1, 1, -1, -1, -1]
    assert values(dataset.test_images) == [30, 31]
    report = capsys.readouterr().err
    assert 'Skipped 2 of the 7 files in ' in report
    assert "'labeled/cat/broken.png' (not one of PNG, JPEG" in report
    assert "'labeled/README' (not a folder of a class)" in report
    assert 'Skipped 2 of the 5 files in ' in report
    assert "'unlabeled/a.png' (" in report
    assert "'unlabeled/notes.txt' (not an image by its name)" in report
    assert 'DS_Store' not in report


def spoil(root, number):
  for i in range(number):
    (root / 'unlabeled' / f'bad{i:03}.jpg').write_bytes(b'bad')


def test_ten_files_may_be_skipped_and_no_eleventh(root, capsys):
  spoil(root, 10)
  load(root)
  assert "bad009.jpg' (not one of" in capsys.readouterr().err
  spoil(root, 11)
  with pytest.raises(UserError) as caught:
    load(root)
  message = str(caught.value)
  assert '11 of the 15 files in' in message
  assert "'unlabeled/bad000.jpg' (" in message
  assert 'and 1 more. Repair' in message
  assert 'bad010' not in message


def test_one_in_twenty_may_be_skipped(root, capsys):
  for i in range(4, 228):
    save(root / 'unlabeled' / f'{i}.bmp', size=(2, 2))
  spoil(root, 12)  # Of 240.
  load(root)
  report = capsys.readouterr().err
  assert 'Skipped 12 of the 240 files' in report
  assert 'and 2 more.' in report
  spoil(root, 13)
  with pytest.raises(UserError, match='13 of the 241 files'):
    load(root)


# Links.


def test_links_are_followed_but_not_in_circles(root, tmp_path):
  save(tmp_path / 'elsewhere' / 'a.png', 50)
  (root / 'labeled' / 'eel').symlink_to(tmp_path / 'elsewhere')
  (root / 'labeled' / 'cat' / 'up').symlink_to(root / 'labeled')
  (root / 'unlabeled' / 'top').symlink_to(root)
  (root / 'unlabeled' / 'self').symlink_to(root / 'unlabeled')
  dataset = load(root)
  assert dataset.class_names == ('cat', 'dog', 'eel')
  assert dataset.train_labels.tolist() == [0, 0, 1, 1, 1, 2, -1, -1, -1, -1]


# The cache.


def test_second_time_nothing_is_decoded(root, decoded):
  first = load(root)
  assert len(decoded) == 11
  second = load(root)
  assert len(decoded) == 11
  np.testing.assert_array_equal(first.train_images, second.train_images)
  np.testing.assert_array_equal(first.test_images, second.test_images)
  np.testing.assert_array_equal(first.train_labels, second.train_labels)
  assert first.class_names == second.class_names


def other_size(path):
  save(path, 99, (20, 30))


def other_mtime(path):
  old = path.stat()
  content = bytearray(path.read_bytes())
  save(path, 99)
  content[:] = path.read_bytes().ljust(len(content), b'\0')
  path.write_bytes(content)
  assert path.stat().st_size == old.st_size
  os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))


def same_mtime(path):
  old = path.stat()
  other_mtime(path)
  os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
  assert path.stat().st_mtime_ns == old.st_mtime_ns


@pytest.mark.parametrize('change', [other_size, other_mtime, same_mtime])
@pytest.mark.parametrize('name', ['labeled/cat/b.png', 'test/dog/1.png'])
def test_changed_file_is_noticed(root, decoded, change, name):
  before = load(root)
  del decoded[:]
  change(root / name)
  after = load(root)
  assert decoded == [pathlib.Path(name).name]
  pixels = [np.concatenate(x[1:4:2]) for x in (before, after)]
  different = np.any(pixels[0] != pixels[1], (1, 2, 3))
  assert np.flatnonzero(different).tolist() == [0 if 'cat' in name else 10]


def test_moved_and_new_files_are_noticed(root, decoded):
  load(root)
  path = root / 'labeled' / 'cat' / 'b.png'
  path.rename(root / 'labeled' / 'dog' / '0.png')
  assert values(load(root).train_images)[:5] == [11, 10, 12, 13, 14]
  save(root / 'unlabeled' / '0.png', 77)
  assert values(load(root).train_images)[5] == 77
  assert len(decoded) == 11 + 1 + 1


def test_files_of_equal_size_and_times_are_apart(tmp_path):
  """As of those that are written within a tick of the clock."""
  save(tmp_path / 'a.png')
  (tmp_path / 'b.png').hardlink_to(tmp_path / 'a.png')
  paths = [tmp_path / 'a.png', tmp_path / 'b.png']
  assert len(set(cache.keys_of(tmp_path, paths, (8, 8, 3)))) == 2


@pytest.mark.parametrize('what', ['rule', 'pillow'])
def test_another_way_of_reading_is_noticed(root, decoded, monkeypatch, what):
  load(root)
  if what == 'rule':
    monkeypatch.setattr(images, 'RULE', 'another')
  else:
    monkeypatch.setattr(images.PIL, '__version__', '0.0')
  load(root)
  assert len(decoded) == 22


def test_what_is_no_longer_wanted_goes(root, decoded):
  """And other sizes stay."""
  load(root, 8)
  load(root, 16)
  load(root, 8)
  assert len(decoded) == 22
  (root / cache.FOLDER / '8x8x3-old.npy').touch()  # Of an earlier version.
  paths = [p for p in root.rglob('*.*') if cache.FOLDER not in p.parts]
  for path in sorted(paths)[:6]:  # More than half.
    save(path, 7)
  load(root, 8)
  assert len(decoded) == 22 + 11
  names = [path.name for path in (root / cache.FOLDER).iterdir()]
  assert sorted(name.partition('-')[0] for name in names) == [
    '16x16x3',
    '8x8x3',
  ]


def test_tables_leave_the_archives_of_others(root, decoded):
  paths = root.glob('test/**/*.png'), root.glob('labeled/**/*.png')
  for name, chosen in zip(('a.csv', 'b.csv'), paths, strict=True):
    found = [path.relative_to(root) for path in chosen]
    rows = [f'{path},{path.parts[1]}' for path in found]
    (root / name).write_text('\n'.join(['path,label', *rows]))
  for _ in range(2):
    for table in ('a.csv', 'b.csv'):
      load(root / table)
    assert len(decoded) == 7
  load(root)  # What they have is not decoded again.
  assert len(decoded) == 11


def test_an_archive_that_another_run_removes_is_passed_over(root, decoded):
  load(root)
  # It is in the list of files, and not there.
  (root / cache.FOLDER / '8x8x3-.npz').symlink_to('nowhere')
  load(root)
  assert len(decoded) == 11


def test_leftovers_of_killed_runs_go_after_a_day(root):
  load(root)
  leftover = root / cache.FOLDER / '8x8x3-0.npz.1.tmp'
  for age, stays in ((100, True), (2 * 24 * 3600, False)):
    leftover.touch()
    time = leftover.stat().st_mtime - age
    os.utime(leftover, (time, time))
    save(root / 'unlabeled' / f'{age}.png')
    load(root)
    assert leftover.exists() == stays


def cut(file):
  file.write_bytes(file.read_bytes()[:-5])


def other_pixel(file):
  content = bytearray(file.read_bytes())
  content[content.index(bytes([10] * 90))] = 11
  file.write_bytes(content)


def fewer_rows(file):
  keys, pixels, why = cache.load(file)
  np.savez(file, keys=np.array(keys, 'S'), pixels=pixels[:-1], why=why)


def numbers_as_keys(file):
  _, pixels, why = cache.load(file)
  np.savez(file, keys=np.arange(len(why)), pixels=pixels, why=why)


def nothing_inside(file):
  np.savez(file)


@pytest.mark.parametrize(
  'damage', [cut, other_pixel, fewer_rows, numbers_as_keys, nothing_inside]
)
def test_damaged_cache_is_not_used(root, decoded, damage, capsys):
  before = load(root)
  damage(stored(root))
  capsys.readouterr()
  after = load(root)
  np.testing.assert_array_equal(before.train_images, after.train_images)
  assert len(decoded) == 22
  assert 'is damaged' in capsys.readouterr().err
  load(root)  # It has been repaired.
  assert len(decoded) == 22


def arrays(dataset):
  return [x.tobytes() for x in dataset[1:5]]


def test_interrupted_decoding_resumes(root, decoded, monkeypatch):
  """Two at a time; Ctrl-C comes in the fourth pair."""
  (root / 'unlabeled' / 'a.png').write_bytes(b'bad')
  whole = arrays(load(root))
  shutil.rmtree(root / cache.FOLDER)
  del decoded[:]
  monkeypatch.setattr(cache, '_MOST', 2)
  note = images.read

  def interrupted(path, shape):
    if len(decoded) == 6:
      raise KeyboardInterrupt
    return note(path, shape)

  monkeypatch.setattr(images, '_THREADS', 1)
  monkeypatch.setattr(images, 'read', interrupted)
  with pytest.raises(KeyboardInterrupt):
    load(root)
  assert len(decoded) == 6
  monkeypatch.setattr(images, 'read', note)
  assert arrays(load(root)) == whole
  assert len(decoded) == 11
  # A file that was decoded, and has changed since.
  del decoded[:]
  save(root / 'labeled' / 'cat' / 'b.png', 99)
  assert arrays(load(root)) != whole
  assert decoded == ['b.png']


@pytest.mark.parametrize('terminal', [True, False])
def test_progress_is_shown(root, monkeypatch, capsys, terminal):
  monkeypatch.setattr('sys.stderr.isatty', lambda: terminal)
  load(root)
  quick = capsys.readouterr().err
  assert ('Decoding: 100%' in quick) == terminal
  monkeypatch.setattr(messages, '_EVERY', 0)
  load(root, 16)
  assert ('Decoding: 5 of 11 images, about 00:' in capsys.readouterr().err) == (
    not terminal
  )


def test_folder_that_cannot_be_written_is_read_without_cache(
  root, decoded, capsys
):
  (root / cache.FOLDER).write_text('in the way')
  for _ in range(2):
    assert len(load(root).train_images) == 9
    assert 'not kept for the next run' in capsys.readouterr().err
  assert len(decoded) == 22


def test_part_is_not_read_twice_in_memory(root):
  """Train and test are views of one array."""
  dataset = load(root)
  assert dataset.train_images.base is dataset.test_images.base
