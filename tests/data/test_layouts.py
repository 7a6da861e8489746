"""Folders as people have them become datasets, or one line says why not."""

import os
import unicodedata

from PIL import Image
import pytest

from flatmatch_jax import data
from flatmatch_jax.data import layouts
from flatmatch_jax.types import UserError

# Values of pixels, by which an image is recognized.
CATS, DOGS, REST, TESTS = (10, 11), (12, 13, 14), (20, 21), (30, 31)


def save(path, value=0):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new('RGB', (9, 9), (value, value, value)).save(path)


def save_classes(folder, cats=CATS, dogs=DOGS):
  for name, values in (('cat', cats), ('dog', dogs)):
    for value in values:
      save(folder / name / f'{value}.png', value)


def save_all(folder, values=REST):
  for value in values:
    save(folder / f'{value}.png', value)


def roots(root):
  """The same images in each layout; all but the last two have the same test."""
  save_classes(root / 'usual' / 'labeled')
  save_all(root / 'usual' / 'unlabeled')
  save_classes(root / 'beside' / 'labeled')
  save_all(root / 'beside')
  save_classes(root / 'deep' / 'labeled')
  save_all(root / 'deep' / 'phone' / 'june')
  save_classes(root / 'train' / 'train')
  save_all(root / 'train' / 'unlabeled')
  save_classes(root / 'plain')
  save_all(root / 'plain' / 'unlabeled')
  save_classes(root / 'elsewhere')
  (root / 'linked').mkdir()
  (root / 'linked' / 'labeled').symlink_to(root / 'elsewhere')
  (root / 'linked' / 'unlabeled').symlink_to(root / 'usual' / 'unlabeled')
  return {
    'usual': ('test', 'labeled/CLASS, unlabeled/, test/CLASS'),
    'beside': ('test', 'labeled/CLASS, the images beside labeled/, test/CLASS'),
    'deep': ('valid', 'labeled/CLASS, the images beside labeled/, valid/CLASS'),
    'train': ('val', 'train/CLASS, unlabeled/, val/CLASS'),
    'plain': ('validation', 'CLASS, unlabeled/, validation/CLASS'),
    'linked': ('test', 'labeled/CLASS, unlabeled/, test/CLASS'),
  }


def load(path):
  dataset = data.load('folder', path, image_size=8)
  values = [x[:, 0, 0, 0].tolist() for x in dataset[1:4:2]]
  labels = dataset.train_labels.tolist(), dataset.test_labels.tolist()
  return dataset.class_names, *values, *labels


EXPECTED = (
  ('cat', 'dog'),
  [*CATS, *DOGS, *REST],
  [*TESTS],
  [0, 0, 1, 1, 1, -1, -1],
  [0, 1],
)


def test_layouts_of_folders_give_the_same_arrays(tmp_path, capsys):
  for name, (test, words) in roots(tmp_path).items():
    save_classes(tmp_path / name / test, [TESTS[0]], [TESTS[1]])
    assert load(tmp_path / name) == EXPECTED, name
    assert (
      f'Read {words}: labeled: cat 2, dog 3 (unbalanced); 2 unlabeled; 2 test.'
    ) in capsys.readouterr().err


ROWS = [
  *((f'photos/cat/{value}.png', 'cat', '') for value in CATS),
  *((f'photos/dog/{value}.png', 'dog', 'train') for value in DOGS),
  *((f'photos/{value}.png', '', '') for value in REST),
  ('photos/30.png', 'cat', 'Test'),
  ('photos/31.png', 'dog', 'test'),
]


def write(file, rows, header='path,label,split', delimiter=','):
  lines = [header.replace(',', delimiter), *map(delimiter.join, rows)]
  file.write_text('\n'.join(lines) + '\n', encoding='utf-8-sig')
  return file


@pytest.fixture
def photos(tmp_path):
  save_classes(tmp_path / 'photos')
  save_all(tmp_path / 'photos', (*REST, *TESTS))
  return tmp_path


@pytest.mark.parametrize('delimiter', [',', ';', '\t'])
def test_a_table_gives_the_same_arrays(photos, capsys, delimiter):
  file = write(photos / 'mine.csv', ROWS[::-1], delimiter=delimiter)
  # As paths sort: 20.png comes before cat/.
  assert load(file) == EXPECTED
  assert 'Read mine.csv: labeled: cat 2' in capsys.readouterr().err


def test_a_table_in_the_folder_labels_some_of_its_images(photos, capsys):
  rows = [row for row in ROWS if row[1]]
  write(photos / 'labels.csv', [r[::-1] for r in rows], 'split,class,file')
  assert load(photos) == EXPECTED
  assert 'Read labels.csv, the images it does not list: labeled: cat 2' in (
    capsys.readouterr().err
  )
  assert len(load(photos / 'labels.csv')[1]) == 7


def test_a_table_beside_test_folders_is_tested_on_them(photos, capsys):
  rows = [row for row in ROWS[:-2] if row[1]]
  (photos / 'photos' / '30.png').unlink()
  (photos / 'photos' / '31.png').unlink()
  save_classes(photos / 'test', [*TESTS[:1], 40], TESTS[1:])
  write(photos / 'labels.csv', [*rows, ('test/cat/40.png', 'cat', '')])
  names, train, *others = load(photos)
  assert (names, *others[::2]) == (EXPECTED[0], [30, 31], [0, 1])
  assert train == [*CATS, *DOGS, 40, *REST]
  assert 'Read labels.csv, the images it does not list, test/CLASS: ' in (
    capsys.readouterr().err
  )
  write(photos / 'labels.csv', [*rows, ('test/cat/30.png', 'cat', 'val')])
  assert load(photos)[2] == [30]
  assert ', not used: test/: ' in capsys.readouterr().err


@pytest.mark.parametrize('more', [(), REST])
def test_a_table_of_images_in_train(tmp_path, more):
  """As a download has them, perhaps with a test set without labels."""
  save_all(tmp_path / 'train', (*CATS, *DOGS))
  save_all(tmp_path / 'test', more)
  names = {'cat': CATS, 'dog': DOGS}
  rows = [(f'train/{v}.png', n) for n in names for v in names[n]]
  write(tmp_path / 'labels.csv', rows, 'path,label')
  assert load(tmp_path)[1] == [*CATS, *DOGS, *more]


def test_other_sets_are_named_and_not_used(tmp_path, capsys):
  save_classes(tmp_path / 'train')
  save_classes(tmp_path / 'test')
  save_classes(tmp_path / 'val')
  save_all(tmp_path / 'more')
  assert len(load(tmp_path)[1]) == 5
  said = capsys.readouterr().err
  assert 'Read train/CLASS, test/CLASS, not used: val/, more/: ' in said


def test_all_images_may_have_labels(tmp_path):
  save_classes(tmp_path)
  assert load(tmp_path)[3] == [0, 0, 1, 1, 1]


def test_train_may_be_a_class(tmp_path):
  save_classes(tmp_path)
  save(tmp_path / 'train' / '1.png', 50)
  assert load(tmp_path)[0] == ('cat', 'dog', 'train')


def test_a_class_is_one_however_its_name_is_encoded(tmp_path):
  save_classes(tmp_path / 'train')
  for form in ('NFC', 'NFD'):
    name = unicodedata.normalize(form, 'café')
    save(tmp_path / 'train' / name / f'{form}.png', 50)
  save(tmp_path / 'test' / name / '1.png', 51)
  names, _, _, train, test = load(tmp_path)
  assert names == ('café', 'cat', 'dog')
  assert (train.count(0), test) == (2, [0])


@pytest.mark.parametrize(
  'name', ['a\nb', '=1+1', 'x y', '💐', os.fsdecode(b'\xff')]
)
def test_classes_of_any_name(tmp_path, capsys, name):
  save_classes(tmp_path)
  save(tmp_path / name / '1.png', 50)
  assert name in load(tmp_path)[0]
  assert capsys.readouterr().err.count('\n') == 1


# What is refused: a function that makes a folder, and what the line says.


def empty(root):
  root.mkdir(exist_ok=True)


def only_images(root):
  save_all(root)


def only_unlabeled(root):
  save_all(root / 'unlabeled')


def two_sources(root):
  save_classes(root / 'labeled')
  save_classes(root / 'train')


def table_and_folders(root):
  save_classes(root / 'labeled')
  (root / 'labels.csv').write_text('path,label\n')


def loose_among_classes(root):
  save_classes(root)
  save(root / 'x.jpg')


def wrapped(root):
  save_classes(root / 'photos')


def twice_sorted(root):
  save_classes(root / '2023')
  save_classes(root / '2024')


def twins(root):
  save_classes(root / 'labeled')
  save_all(root / 'cat')


def twins_of_labeling(root):
  twins(root)
  save_all(root / 'unlabeled')


def loose_test(root):
  save_classes(root / 'train')
  save_all(root / 'test')


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (empty, 'holds no folders of images; accepted are labeled/CLASS'),
    (only_images, 'have no labels. Give some with python -m flatmatch_jax.lab'),
    (only_unlabeled, 'have no labels. Give some with python -m flatmatch_jax'),
    (two_sources, 'has labels in labeled/ and in train/; move all but one'),
    (two_sources, 'name one alone; accepted are labeled/CLASS/* with'),
    (table_and_folders, 'has labels in labeled/ and in labels.csv; move'),
    (loose_among_classes, 'x.jpg lies beside the folders of classes'),
    (wrapped, 'If they are inside, name it: --config.data_dir='),
    (twice_sorted, '2023, 2024 or, in each of them, cat, dog could be the'),
    (twins, 'has cat/ and labeled/cat/: do the images of the first have'),
    (twins_of_labeling, 'has cat/ and labeled/cat/: do the images of the'),
    (loose_test, '20.png lies directly in test/, so its class is unknown'),
  ],
)
def test_a_folder_that_is_ambiguous_is_refused(tmp_path, make, words):
  make(tmp_path)
  with pytest.raises(UserError) as caught:
    layouts.find(tmp_path)
  assert words in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('', "must name the columns path,label and perhaps split, but is ''"),
    ('photos/cat/10.png,cat\n', "but is 'photos/cat/10.png,cat'; add"),
    ('path,label\n,cat\n', 'line 2 has no path'),
    ('path,label,split\na.png,cat,hidden\n', "line 2 has the split 'hidden'"),
    ('path,label,split\n\na.png,,test\n', 'line 3 is for the test set but has'),
    (
      'path,label\na.png,cat\n./a.png,dog\n',
      "line 3 names './a.png' as line 2",
    ),
    (
      'path,label\nx.png,cat\ny.png,dog\n',
      "lists 'x.png' and 1 other file, none",
    ),
    ('path,label\n"a.png,cat\n', 'cannot be read: unexpected end of data'),
    ('path,label\n\udcff.png,cat\n', "cannot be read: 'utf-8' codec"),
    ('path,label,split\nphotos/20.png,cat,\nphotos/21.png,eel,val', "'eel' of"),
  ],
)
def test_a_table_that_is_wrong_is_refused(photos, text, words):
  file = photos / 'mine.csv'
  file.write_text(text, errors='surrogateescape')
  with pytest.raises(UserError) as caught:
    layouts.find(file)
  assert words in str(caught.value)
  assert str(file) in str(caught.value)
  assert '\n' not in str(caught.value)


def test_files_that_a_table_lists_and_that_are_gone_are_skipped(photos, capsys):
  rows = [*ROWS, ('photos/gone.png', 'cat', '')]
  assert load(write(photos / 'mine.csv', rows)) == EXPECTED
  assert "'photos/gone.png' (no such file)" in capsys.readouterr().err
