"""Your own images: a folder of classes, or a CSV file of path,label.

  python main.py --config configs/folder.py --config.data_dir=DIR
  python main.py --config configs/folder.py:image_size=96 --config.data_dir=DIR
  python main.py --config configs/folder.py:method=fixmatch,labels=40 \
      --config.data_dir=DIR
  python main.py --config configs/folder.py:model=resnet_18,image_size=128 \
      --config.data_dir=DIR --config.pretrained=resnet18.safetensors

DIR has labeled/CLASS/* and unlabeled/*, or train/CLASS/*, or CLASS/*, each with
test/CLASS/* if you can, or labels.csv. All labeled images are used, or `labels`
drawn from them; the rest counts as unlabeled. Without test images hold some
labeled ones out with --config.num_val=N. See docs/own_images.md.

Without an accelerator a small network trains for about 50 minutes of one core;
fast=true or fast=false after the colon chooses it or not. For example, from 200
labels of ten kinds of clothes it ends at 19.9 ± 0.9% test error after 1,000
steps, five minutes of a core, where labels alone give 22.6 ± 0.8%.
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  defaults = {
    'labels': 'all',
    'image_size': 32,
    'fast': 'auto',
    'model': 'auto',
  }
  config = common.base(arg, 'folder', paper_labels=(), **defaults)
  model = common.parse(arg, **defaults)['model']
  common.set_own(config, config.image_size, model)
  # ImageNet's: photos of any kind.
  config.mean = (0.485, 0.456, 0.406)
  config.std = (0.229, 0.224, 0.225)
  return config
