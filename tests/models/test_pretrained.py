"""Weights travel through both public layouts, and broken files are refused."""

import io
import json
import pickle
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vit_weights import HEADS, save_npz, to_google

from flatmatch_jax import models
from flatmatch_jax.models import pretrained, weight_names
from flatmatch_jax.models.vit import VisionTransformer
from flatmatch_jax.types import Head, UserError


def make(image=8, classes=3, seed=0, **kwargs):
  """A tiny ViT, random parameters (biases too) and images."""
  kwargs = {'patch': 4, 'size': 8, 'depth': 2, 'num_heads': HEADS} | kwargs
  model = VisionTransformer(classes, **kwargs)
  rng = np.random.RandomState(seed)
  x = rng.randn(2, image, image, 3).astype(np.float32)
  init = lambda: model.init(jax.random.key(0), x, train=False)
  params = jax.tree.map(
    lambda p: 0.4 * rng.randn(*p.shape).astype(p.dtype),
    jax.eval_shape(init)['params'],
  )
  return model, params, x


def logits(model, params, x):
  apply = jax.jit(
    lambda params: model.apply({'params': params}, x, train=False)
  )
  return apply(params).logits


def load(path, params):
  """A ViT has no statistics."""
  loaded, stats, report = pretrained.load(path, params, {})
  assert stats == {}
  return loaded, report


def to_timm(params):
  def linear(name, p):
    return {f'{name}.weight': p['kernel'].T, f'{name}.bias': p['bias']}

  def norm(name, p):
    return {f'{name}.weight': p['scale'], f'{name}.bias': p['bias']}

  arrays = {
    'cls_token': params['cls'],
    'pos_embed': params['position'],
    'patch_embed.proj.weight': params['patch']['kernel'].transpose(3, 2, 0, 1),
    'patch_embed.proj.bias': params['patch']['bias'],
    **norm('norm', params['norm']),
    **linear('head', params['classifier']),
  }
  for i in (0, 1):
    block = params[f'block{i + 1}']
    arrays |= norm(f'blocks.{i}.norm1', block['norm1'])
    arrays |= linear(f'blocks.{i}.attn.qkv', block['qkv'])
    arrays |= linear(f'blocks.{i}.attn.proj', block['out'])
    arrays |= norm(f'blocks.{i}.norm2', block['norm2'])
    arrays |= linear(f'blocks.{i}.mlp.fc1', block['mlp1'])
    arrays |= linear(f'blocks.{i}.mlp.fc2', block['mlp2'])
  return {name: np.asarray(x) for name, x in arrays.items()}


def save_safetensors(path, arrays, dtype='F32'):
  kind = {'F32': np.float32, 'F16': np.float16, 'BF16': jnp.bfloat16}[dtype]
  header, data = {'__metadata__': {'format': 'pt'}}, b''
  for name, x in arrays.items():
    raw = np.ascontiguousarray(x).astype(kind).tobytes()
    header[name] = {
      'dtype': dtype,
      'shape': list(x.shape),
      'data_offsets': [len(data), len(data) + len(raw)],
    }
    data += raw
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)
  return str(path)


SAVE = {
  'google': lambda path, params: save_npz(path, to_google(params)),
  'timm': lambda path, params: save_safetensors(path, to_timm(params)),
}


@pytest.mark.parametrize('layout', SAVE)
def test_round_trip(tmp_path, layout):
  model, source, x = make()
  _, params, _ = make(seed=1)
  path = SAVE[layout](tmp_path / 'w.npz', source)
  loaded, report = load(path, params)
  wanted, got = logits(model, source, x), logits(model, loaded, x)
  assert np.abs(wanted - logits(model, params, x)).max() > 0.1
  np.testing.assert_allclose(got, wanted, atol=1e-5)
  assert (report.kept, report.unused, report.resized) == ((), (), '')
  number = len(jax.tree.leaves(params))
  assert report.describe() == f'Loaded {number} of {number} arrays.'


@pytest.mark.parametrize(('dtype', 'atol'), [('F16', 2e-3), ('BF16', 2e-2)])
def test_half_precision_becomes_float32(tmp_path, dtype, atol):
  _, source, _ = make()
  path = save_safetensors(tmp_path / 'w.safetensors', to_timm(source), dtype)
  loaded, _ = load(path, make(seed=1)[1])
  for a, b in zip(*map(jax.tree.leaves, (loaded, source)), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize('layout', SAVE)
def test_positions_are_resized_and_the_class_token_is_not(tmp_path, layout):
  _, source, _ = make(image=16)
  parabola = np.arange(4)[:, None, None] ** 2  # Bicubic leaves it one.
  source['position'][0, 1:] = np.broadcast_to(parabola, (4, 4, 8)).reshape(
    16, 8
  )
  _, params, _ = make(image=32, seed=1)
  path = SAVE[layout](tmp_path / 'w.npz', source)
  loaded, report = load(path, params)
  position = loaded['position']
  np.testing.assert_array_equal(position[:, 0], source['position'][:, 0])
  rows = position[0, 1:].reshape(8, 8, 8)
  np.testing.assert_allclose(rows - rows[:, :1, :1], 0, atol=1e-5)
  np.testing.assert_allclose(
    rows[3:5, 0, 0], np.array([1.25, 1.75]) ** 2, rtol=1e-6
  )
  assert report.resized == 'from 4x4 to 8x8'
  assert 'from 4x4 to 8x8' in report.describe()


@pytest.mark.parametrize('layout', SAVE)
def test_another_classifier_is_kept_and_extra_heads_too(tmp_path, layout):
  _, source, _ = make(classes=5)
  _, params, _ = make(heads=(Head('rotation', 4),), seed=1)
  path = SAVE[layout](tmp_path / 'w.npz', source)
  loaded, report = load(path, params)
  for name in ('classifier', 'rotation'):
    for leaf, value in loaded[name].items():
      np.testing.assert_array_equal(value, params[name][leaf])
  assert set(report.kept) == {
    f'{head}/{leaf}'
    for head in ('classifier', 'rotation')
    for leaf in ('kernel', 'bias')
  }
  assert len(report.unused) == 2
  assert all(name.startswith('head') for name in report.unused)


def test_unmatched_names_are_reported_on_both_sides(tmp_path):
  _, source, _ = make()
  arrays = to_google(source)
  attention = 'Transformer/encoderblock_1/MultiHeadDotProductAttention_1'
  del arrays['head/bias']
  arrays['pre_logits/kernel'] = np.zeros((8, 8), np.float32)
  arrays['step'] = np.int64(7)
  params = make(seed=1)[1]
  loaded, report = load(save_npz(tmp_path / 'w.npz', arrays), params)
  kept = ('classifier/bias', 'classifier/kernel')
  assert tuple(sorted(report.kept)) == kept
  unused = {'head/kernel', 'pre_logits/kernel', 'step'}
  assert set(report.unused) == unused
  _, _, told = report.describe().partition(': ')
  drawn, _, more = told.partition('. ')
  assert all(name in drawn for name in kept)
  assert all(name in more for name in unused)
  np.testing.assert_array_equal(
    loaded['classifier']['kernel'], params['classifier']['kernel']
  )
  # A part of the network alone would be no start.
  del arrays[f'{attention}/key/kernel']
  with pytest.raises(UserError, match=r'for 1 of the 32 .*block2/qkv/kernel'):
    load(save_npz(tmp_path / 'w.npz', arrays), params)


@pytest.mark.parametrize(
  ('layout', 'kwargs', 'match'),
  [
    ('google', {'size': 16}, r'Dense_0/bias .*\(32,\).*mlp1/bias of \(64,\)'),
    ('timm', {'size': 16}, r'fc1.bias .*\(32,\).*mlp1/bias of \(64,\)'),
    ('google', {'patch': 2}, r'\(4, 4, 3, 8\).*patch/kernel of \(2, 2, 3, 8\)'),
    ('timm', {'patch': 2}, r'\(8, 3, 4, 4\).*patch/kernel of \(2, 2, 3, 8\)'),
  ],
)
def test_another_size_is_an_error_with_both_shapes(
  tmp_path, layout, kwargs, match
):
  SAVE[layout](tmp_path / 'w.npz', make()[1])
  with pytest.raises(UserError, match=match):
    load(str(tmp_path / 'w.npz'), make(**kwargs)[1])


@pytest.mark.parametrize(
  ('name', 'shape'),
  [
    ('query/kernel', (2, 8, 4)),
    ('out/kernel', (8, 2, 4)),
  ],
)
def test_attention_must_have_the_size_of_its_heads(tmp_path, name, shape):
  arrays = to_google(make()[1])
  root = 'Transformer/encoderblock_0/MultiHeadDotProductAttention_1'
  assert f'{root}/{name}' in arrays
  arrays[f'{root}/{name}'] = np.zeros(shape, np.float32)
  refuse(save_npz(tmp_path / 'w.npz', arrays), f'{name} in ')


@pytest.mark.parametrize('tokens', [0, 1, 7])
def test_positions_that_are_no_square_are_an_error(tmp_path, tokens):
  arrays = to_timm(make()[1])
  arrays['pos_embed'] = np.zeros((1, tokens, 8), np.float32)
  path = save_safetensors(tmp_path / 'w', arrays)
  with pytest.raises(UserError, match=r'pos_embed|square'):
    load(path, make(seed=1)[1])


def test_only_a_vit_can_be_loaded(tmp_path):
  path = SAVE['timm'](tmp_path / 'w', make()[1])
  model = models.create('wrn_10_1', 3)
  x = jnp.zeros((1, 8, 8, 3))
  variables = jax.eval_shape(
    lambda: model.init(jax.random.key(0), x, train=True)
  )
  with pytest.raises(UserError, match='vit_SIZE_PATCH'):
    load(path, variables['params'])


def refuse(path, match):
  with pytest.raises(UserError, match=match):
    load(str(path), make(seed=1)[1])


def test_no_file_and_unknown_names(tmp_path):
  refuse(tmp_path / 'absent', 'not a file')
  refuse(tmp_path, 'not a file')
  for save, name in ((save_npz, 'a.npz'), (save_safetensors, 'a.safetensors')):
    save(tmp_path / name, {'fc.weight': np.zeros(2, np.float32)})
    refuse(tmp_path / name, r'none of the names of a ViT: fc\.weight')


def test_damaged_bytes_fail_the_checksum(tmp_path):
  path = tmp_path / 'w.npz'
  arrays = to_google(make()[1])
  save_npz(path, arrays)
  data = bytearray(path.read_bytes())
  at = data.index(arrays['embedding/kernel'].tobytes())
  data[at + 5] ^= 1
  path.write_bytes(data)
  refuse(path, 'cannot be read')


def test_pickles_are_never_opened(tmp_path):
  class Bomb:
    def __reduce__(self):
      return (pytest.fail, ('unpickled',))

  path = tmp_path / 'w.npz'
  path.write_bytes(pickle.dumps(Bomb()))
  refuse(path, 'pickles are not opened')
  arrays = to_google(make()[1])
  np.savez(path, **arrays, extra=np.array([Bomb()], dtype=object))
  refuse(path, "'extra' is an array of Python objects")
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('archive/data.pkl', pickle.dumps(Bomb()))
  refuse(path, r"'archive/data\.pkl' is not an array")


def npy(shape, data=b'', descr='<f4'):
  file = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    file, {'descr': descr, 'fortran_order': False, 'shape': shape}
  )
  return file.getvalue() + data


SOUND = npy((1, 5, 8), bytes(160))


@pytest.mark.parametrize(
  'member',
  [
    npy((2**40,)),
    npy((1, 5, 8), bytes(160), descr='<i4'),
    SOUND.replace(b'(1, 5, 8)', b'((((((((('),
    SOUND.replace(b'NUMPY\x01', b'NUMPY\x02'),
  ],
)
def test_malformed_arrays(tmp_path, member):
  name = 'Transformer/posembed_input/pos_embedding'
  path = tmp_path / 'w.npz'
  for content, match in (
    (SOUND, 'has nothing for 29 of the 32'),  # It can be read, but is alone.
    (member, 'cannot be read'),
  ):
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr(f'{name}.npy', content)
    refuse(path, match)


def test_large_arrays_are_not_read(tmp_path, monkeypatch):
  """Shapes are compared first: zeros deflate to a thousandth."""
  with zipfile.ZipFile(
    tmp_path / 'w.npz', 'w', zipfile.ZIP_DEFLATED
  ) as archive:
    archive.writestr('cls.npy', npy((1, 1, 2**20), bytes(2**22)))
    archive.writestr('Transformer/x.npy', npy((2**20,), bytes(2**22)))
  monkeypatch.setattr(
    weight_names.Source, 'read', lambda *_: pytest.fail('was read')
  )
  refuse(tmp_path / 'w.npz', r'cls .*\(1, 1, 1048576\).*\(1, 1, 8\)')


def entry(shape=(1, 1, 8), offsets=(0, 32), dtype='F32'):
  return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


@pytest.mark.parametrize(
  ('header', 'match'),
  [
    ({'cls_token': entry(offsets=(0, 64))}, 'beyond the file'),
    ({'cls_token': entry(offsets=(-32, 0))}, 'malformed'),
    ({'cls_token': entry(shape=(1, 1, 10**30))}, 'size of its shape'),
    ({'cls_token': entry(dtype='I64')}, 'I64'),
    ([], 'not a table'),
    (b'{"a": 1', 'cannot be read'),
  ],
)
def test_malformed_safetensors_headers(tmp_path, header, match):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path = tmp_path / 'w.safetensors'
  path.write_bytes(struct.pack('<Q', len(text)) + text + bytes(32))
  refuse(path, match)


@pytest.mark.parametrize('length', [100, 2**30, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file(tmp_path, length):
  path = tmp_path / 'w.safetensors'
  path.write_bytes(struct.pack('<Q', length) + b'{}')
  refuse(path, f'header of {length} bytes')


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_weights_must_be_finite(tmp_path, value):
  arrays = to_timm(make()[1])
  arrays['norm.weight'] = np.full(8, value)
  refuse(save_safetensors(tmp_path / 'w', arrays), r'norm\.weight holds NaN')
