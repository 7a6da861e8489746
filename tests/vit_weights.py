"""Weights of a ViT in the layout of Google's files."""

import numpy as np

HEADS = 2


def to_google(params):
  """The public names, written down here a second time."""
  arrays = {
    'cls': params['cls'],
    'Transformer/posembed_input/pos_embedding': params['position'],
    'embedding/kernel': params['patch']['kernel'],
    'embedding/bias': params['patch']['bias'],
    'Transformer/encoder_norm/scale': params['norm']['scale'],
    'Transformer/encoder_norm/bias': params['norm']['bias'],
    'head/kernel': params['classifier']['kernel'],
    'head/bias': params['classifier']['bias'],
  }
  for i in (0, 1):
    block = params[f'block{i + 1}']
    size = len(block['norm1']['scale'])
    root = f'Transformer/encoderblock_{i}'
    attention = f'{root}/MultiHeadDotProductAttention_1'
    for leaf in ('scale', 'bias'):
      arrays[f'{root}/LayerNorm_0/{leaf}'] = block['norm1'][leaf]
      arrays[f'{root}/LayerNorm_2/{leaf}'] = block['norm2'][leaf]
    for leaf in ('kernel', 'bias'):
      arrays[f'{root}/MlpBlock_3/Dense_0/{leaf}'] = block['mlp1'][leaf]
      arrays[f'{root}/MlpBlock_3/Dense_1/{leaf}'] = block['mlp2'][leaf]
    for j, part in enumerate(('query', 'key', 'value')):
      columns = slice(j * size, (j + 1) * size)
      kernel = block['qkv']['kernel'][:, columns].reshape(size, HEADS, -1)
      arrays[f'{attention}/{part}/kernel'] = kernel
      bias = block['qkv']['bias'][columns].reshape(HEADS, -1)
      arrays[f'{attention}/{part}/bias'] = bias
    kernel = block['out']['kernel'].reshape(HEADS, -1, size)
    arrays[f'{attention}/out/kernel'] = kernel
    arrays[f'{attention}/out/bias'] = block['out']['bias']
  return {name: np.asarray(x) for name, x in arrays.items()}


def save_npz(path, arrays):
  np.savez(path, **arrays)
  return str(path)
