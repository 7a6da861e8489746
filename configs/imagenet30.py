"""Thirty classes of ImageNet, with 50 or 100 labels per class.

python main.py --config configs/imagenet30.py --workdir runs/imagenet30
python main.py --config configs/imagenet30.py:method=flatmatch_e,labels=3000

The classes are those of Hendrycks et al., "Using Self-Supervised Learning Can
Improve Model Robustness and Uncertainty" (https://arxiv.org/abs/1906.12340),
taken from TFDS's imagenet2012, which has to be prepared: see imagenet.py. That
gives 39,000 images to train, 1,300 a class, and 1,500 of the validation set to
test, 50 a class. The test set of those authors, 100 a class, is a file of its
own that TFDS does not have; the paper speaks of 30,000 training images and
does not say which.

Batches, weight decay and learning rate are those of the paper's supplement;
it does not give the number of steps.
"""

from flatmatch_jax.training import common, run_length

# Our class numbers follow this order. Names are those authors', the others are
# ImageNet's, which TFDS uses as names.
CLASSES = {
  'acorn': 'n12267677',
  'airliner': 'n02690373',
  'ambulance': 'n02701002',
  'american_alligator': 'n01698640',
  'banjo': 'n02787622',
  'barn': 'n02793495',
  'bikini': 'n02837789',
  'digital_clock': 'n03196217',
  'dragonfly': 'n02268443',
  'dumbbell': 'n03255030',
  'forklift': 'n03384352',
  'goblet': 'n03443371',
  'grand_piano': 'n03452741',
  'hotdog': 'n07697537',
  'hourglass': 'n03544143',
  'manhole_cover': 'n03717622',
  'mosque': 'n03788195',
  'nail': 'n03804744',
  'parking_meter': 'n03891332',
  'pillow': 'n03938244',
  'revolver': 'n04086273',
  'rotary_dial_telephone': 'n03187595',  # ImageNet: dial telephone.
  'schooner': 'n04147183',
  'snowmobile': 'n04252077',
  'soccer_ball': 'n04254680',
  'stingray': 'n01498041',
  'strawberry': 'n07745940',
  'tank': 'n04389033',
  'toaster': 'n04442312',
  'volcano': 'n09472597',
}


def get_config(arg=''):
  config = common.base(
    arg, 'imagenet30', paper_labels=(1500, 3000), labels=1500
  )
  config.classes = CLASSES
  config.mean = (0.485, 0.456, 0.406)
  config.std = (0.229, 0.224, 0.225)
  config.image_size = 224
  config.pad = 0  # Crops are made on the host.
  config.model = 'resnet_50'
  run_length.follow(config, config, bn_momentum=0.9)  # Torch's 0.1.
  config.batch_size = config.unlabeled_batch_size = 128
  config.learning_rate = 0.03
  config.weight_decay = 3e-4
  return config
