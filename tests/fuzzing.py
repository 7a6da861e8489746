"""Damaged files, the same in every run."""

import hypothesis
from hypothesis import strategies as st


def fuzz(examples):
  return hypothesis.settings(
    derandomize=True, database=None, deadline=None, max_examples=examples
  )


@st.composite
def damaged(draw, originals):
  """One of the `originals` with bytes changed, cut out, doubled or cut off."""
  content = bytearray(draw(st.sampled_from(originals)))
  # Headers are at both ends of files.
  near = st.integers(0, min(200, len(content) - 1))
  place = st.one_of(near, near.map(lambda at: -1 - at), st.integers(0, 10**6))
  for _ in range(draw(st.integers(1, 4))):
    at = draw(place) % max(len(content), 1)
    change = draw(st.sampled_from(('byte', 'word', 'cut', 'double', 'end')))
    if change == 'byte':
      content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
    elif change == 'word':
      number = draw(st.sampled_from((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1)))
      order = draw(st.sampled_from(('little', 'big')))
      content[at : at + 4] = number.to_bytes(4, order)
    elif change == 'cut':
      del content[at : at + draw(st.integers(1, 16))]
    elif change == 'double':
      content[at:at] = content[at : at + draw(st.integers(1, 64))]
    else:
      del content[at:]
  return bytes(content)


JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**70), 2**70)
  | st.floats()
  | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=8,
)
