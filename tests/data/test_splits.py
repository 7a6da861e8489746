"""Labeled sets are balanced, reproducible, and checked when given."""

import json

import numpy as np
import pytest

from flatmatch_jax.data import splits
from flatmatch_jax.types import UserError

LABELS = np.tile(np.arange(10), 10).astype(np.int32)  # [100], index % 10.
# Seed 3, 20 labels.
_DRAWN = '2 17 28 31 34 40 43 46 47 48 50 52 59 74 75 76 81 85 93 99'
PIN = [int(index) for index in _DRAWN.split()]


def test_balanced_draws_the_same_number_of_each_class():
  labels = np.random.RandomState(1).randint(0, 10, 1000)
  drawn = splits.balanced(labels, 40, 0, 10)
  assert np.bincount(labels[drawn]).tolist() == [4] * 10
  assert drawn.dtype == np.int64
  assert (np.diff(drawn) > 0).all()  # Sorted, none twice.


def test_balanced_is_pinned():
  drawn = splits.balanced(LABELS, 20, 3, 10)
  assert drawn.tolist() == PIN
  assert drawn.tolist() == splits.balanced(LABELS, 20, 3, 10).tolist()


def test_seeds_differ():
  draws = {tuple(splits.balanced(LABELS, 20, seed, 10)) for seed in range(20)}
  assert len(draws) == 20


def test_balanced_leaves_the_state_of_numpy_alone():
  before = np.random.get_state()[1].copy()  # noqa: NPY002
  splits.balanced(LABELS, 20, 3, 10)
  np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_unknown_labels_are_never_drawn():
  labels = np.concatenate([LABELS, np.full(900, -1, np.int32)])
  assert splits.balanced(labels, 100, 0, 10).tolist() == list(range(100))
  assert splits.balanced(labels, splits.ALL, 0, 10).tolist() == list(range(100))


def test_all_needs_no_balance():
  labels = np.array([1, -1, 0, 1])
  assert splits.balanced(labels, splits.ALL, 0, 2).tolist() == [0, 2, 3]


@pytest.mark.parametrize('number', [0, -2, -10, 5, 25])
def test_number_must_be_a_positive_multiple(number):
  with pytest.raises(ValueError, match=f'labels {number} must .* 10 classes'):
    splits.balanced(LABELS, number, 0, 10)


@pytest.mark.parametrize(
  ('number', 'near'), [(7, '4 or 8'), (3, '4'), (0, '4'), (-9, '4')]
)
def test_nearest_numbers_of_labels_are_possible(number, near):
  assert splits.nearest(number, 4) == near


def test_scarce_class_is_named():
  labels = LABELS.copy()
  labels[labels == 7] = -1
  labels[7] = 7
  line = 'has 1 labeled image; 20 labels need 2. Label more images of it'
  with pytest.raises(ValueError, match=f'Class 7 {line}'):
    splits.balanced(labels, 20, 0, 10)
  labels[7] = -1
  names = [f'bone {number}' for number in range(10)]
  line = f"Class 'bone 7' {line.replace('1 labeled image', '0 labeled images')}"
  for factor in (1.0, 1.01):
    with pytest.raises(ValueError, match=line):
      splits.make(labels, 10, 20, 0, imbalance=factor, names=names)


@pytest.mark.parametrize(
  'text',
  [
    json.dumps([3, 1, 2, 0, 4, 5, 6, 7, 8, 19]),
    json.dumps({'labeled': [3, 1, 2, 0, 4, 5, 6, 7, 8, 19], 'source': 'drawn'}),
    '3\n1\n2\n0\n4\n\n5\n6\n 7 \n8\r\n19\n',
    '\ufeff\n[3, 1, 2, 0, 4, 5, 6, 7, 8, 19]\n',
  ],
)
def test_read_accepts(tmp_path, text):
  path = tmp_path / 'labels'
  path.write_text(text, encoding='utf-8')
  labeled = splits.read(path, LABELS, 10)
  assert labeled.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 19]
  assert labeled.dtype == np.int64


def test_parts_of_a_split():
  split = splits.make(LABELS, 10, 20, 3)
  assert split.labeled.tolist() == PIN
  assert split.unlabeled.tolist() == list(range(100))
  assert not len(split.validation)
  split = splits.make(LABELS, 10, 20, 3, includes_labeled=False)
  assert sorted([*split.unlabeled, *PIN]) == list(range(100))


def test_validation_images_are_held_out_of_everything():
  split = splits.make(LABELS, 10, 20, 3, num_val=30)
  assert split.labeled.tolist() == PIN  # Whatever is held out.
  assert np.bincount(LABELS[split.validation]).tolist() == [3] * 10
  assert not set(split.validation) & set(split.labeled)
  assert sorted([*split.unlabeled, *split.validation]) == list(range(100))
  other = splits.make(LABELS, 10, 20, 4, num_val=30)
  assert split.validation.tolist() != other.validation.tolist()


def test_validation_is_a_share_of_all_labels():
  """In proportion to the classes, and one label of each class stays."""
  labels = np.repeat([0, 1, 2, -1], [40, 20, 1, 30])
  split = splits.make(labels, 3, splits.ALL, 0, num_val=6)
  assert np.bincount(labels[split.validation]).tolist() == [4, 2]
  assert np.bincount(labels[split.labeled]).tolist() == [36, 18, 1]
  assert len(split.unlabeled) == 91 - 6
  most = splits.make(labels, 3, splits.ALL, 0, num_val=58)
  assert np.bincount(labels[most.labeled]).tolist() == [1, 1, 1]
  with pytest.raises(UserError, match='num_val=59 is more than the 58 '):
    splits.make(labels, 3, splits.ALL, 0, num_val=59)


def test_labels_have_a_long_tail():
  labels = np.tile(np.arange(10), 500)
  split = splits.make(labels, 10, 1000, 0, imbalance=100.0)
  counts = np.bincount(labels[split.labeled])
  assert counts.sum() == 1000
  assert (np.diff(counts) < 0).all()
  exact = 100.0 ** -(np.arange(10) / 9)
  np.testing.assert_allclose(counts, 1000 * exact / exact.sum(), atol=1)
  turned = splits.make(labels, 10, 1000, 0, imbalance=0.01)
  assert np.bincount(labels[turned.labeled]).tolist() == counts[::-1].tolist()
  few = splits.make(labels, 10, 10, 0, imbalance=100.0)
  assert np.bincount(labels[few.labeled]).tolist() == [1] * 10
  with pytest.raises(UserError, match='9 is less than the 10 classes'):
    splits.make(labels, 10, 9, 0, imbalance=100.0)


def test_unlabeled_pool_has_its_own_tail():
  labels = np.tile(np.arange(10), 500)
  split = splits.make(labels, 10, 40, 0, unlabeled_imbalance=50.0)
  expected = np.floor(500 * 50.0 ** -(np.arange(10) / 9) + 1e-9).tolist()
  assert np.bincount(labels[split.unlabeled]).tolist() == expected
  assert set(split.labeled) <= set(split.unlabeled)
  apart = splits.make(
    labels, 10, 40, 0, unlabeled_imbalance=50.0, includes_labeled=False
  )
  assert not set(apart.labeled) & set(apart.unlabeled)
  counts = np.bincount(labels[apart.unlabeled])
  expected = np.floor(496 * 50.0 ** -(np.arange(10) / 9) + 1e-9).tolist()
  assert counts.tolist() == expected
  with pytest.raises(UserError, match=r'leaves 10 images of class 9 .* its 40'):
    splits.make(labels, 10, 400, 0, unlabeled_imbalance=50.0)
  labels[7] = -1
  with pytest.raises(UserError, match='classes of 1 unlabeled images'):
    splits.make(labels, 10, 40, 0, unlabeled_imbalance=50.0)


def test_split_json_is_read_back(tmp_path):
  drawn = splits.make(LABELS, 10, 20, 3, num_val=1)
  content = splits.to_json(drawn, LABELS, 10, 3)
  assert content == {
    'split_seed': 3,
    'source': 'drawn',
    'labeled': PIN,
    'per_class': [2] * 10,
    'unlabeled_per_class': [9] + [10] * 9,
    'validation': drawn.validation.tolist(),
  }
  path = tmp_path / 'split.json'
  path.write_text(json.dumps(content))
  np.testing.assert_array_equal(splits.read(path, LABELS, 10), drawn.labeled)
  again = splits.to_json(drawn, LABELS, 10, 3, str(path))
  assert json.loads(json.dumps(again))['source'] == str(path)


@pytest.mark.parametrize(
  ('content', 'match'),
  [
    (b'', 'holds no index'),
    (b'[]', 'holds no index'),
    (b'[0, 1.0]', '1.0 is not an integer'),
    (b'[0, true]', 'True is not an integer'),
    (b'[[0]]', r'\[0\] is not an integer'),
    (b'0\n1.5\n', "'1.5' is not an integer"),
    (b'1_0', "'1_0' is not an integer"),
    (b'9' * 5000, r"'9{59}\.\.\. is not an integer"),
    (b'[0, 100]', 'index 100 is outside of the 100'),
    (b'0\n-1\n', 'index -1 is outside of the 100'),
    (b'[1' + b'0' * 30 + b']', 'index 10*.* is outside of the 100'),
    (b'[' + b'9' * 5000 + b']', 'not valid'),
    (b'[' * 200_000, 'not valid'),
    (b'{"seed": 1}', r"'labeled', but its keys are \['seed'\]"),
    (b'\x80\x04]q', 'cannot be read'),  # A pickle is not opened.
    (b'[99]', 'label of example 99 is unknown'),
    (b'[4, 5, 4]', 'index 4 occurs more than once'),
    (b'[0, 1, 2, 3, 4, 5, 6, 8]', r'no example of class 7 \(2 of 10'),
  ],
)
def test_read_refuses(tmp_path, content, match):
  labels = LABELS.copy()
  labels[99] = -1
  path = tmp_path / 'labels.txt'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=match) as caught:
    splits.read(path, labels, 10)
  assert str(path) in str(caught.value)
  assert len(str(caught.value)) < 400 + len(str(path))


def test_read_refuses_what_is_no_file(tmp_path):
  for path in (tmp_path, tmp_path / 'absent', '/dev/zero'):
    with pytest.raises(ValueError, match='cannot be read: '):
      splits.read(path, LABELS, 10)


def test_read_refuses_a_large_file(tmp_path, monkeypatch):
  monkeypatch.setattr(splits, '_MAX_BYTES', 100)
  path = tmp_path / 'labels.txt'
  path.write_text('0\n' * 51)
  with pytest.raises(ValueError, match='larger than 100 bytes'):
    splits.read(path, LABELS, 10)


def test_the_surest_guesses_are_taken_from_images_without_labels():
  confidence = np.array([0.9, 0.5, 0.8, 0.8, 0.7, 0.8], np.float32)
  guess = np.array([0, 1, 2, 1, 0, 2], np.float32)
  truth = np.array([0, 1, 2, 2, -1, 2], np.int32)
  chosen = splits.most_confident(confidence, guess, np.array([0]), 2, truth)
  assert chosen['index'] == [2, 3]  # Not 0, and of equals the first.
  assert chosen['label'] == [2, 1]
  assert chosen['confidence'] == pytest.approx([0.8, 0.8])
  assert chosen['accuracy'] == 50.0
  assert confidence[0] == np.float32(0.9)
