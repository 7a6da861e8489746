"""Test errors in percent as the paper prints them, to be compared by eye.

The first line of a block names a dataset and the numbers of labels; the others
begin with a method as the command line calls it. '-' is an empty cell. The last
table is not the paper's: it is of results/classic_cv.csv of USB.
"""

# In the order of the paper.
NAMES = {
  'pi_model': 'Π-Model',
  'pseudo_label': 'Pseudo Label',
  'vat': 'VAT',
  'mean_teacher': 'Mean Teacher',
  'mixmatch': 'MixMatch',
  'remixmatch': 'ReMixMatch',
  'uda': 'UDA',
  'fixmatch': 'FixMatch',
  'dash': 'Dash',
  'mpl': 'MPL',
  'flexmatch': 'FlexMatch',
  'softmatch': 'SoftMatch',
  'freematch': 'FreeMatch',
  'flatmatch': 'FlatMatch',
  'flatmatch_e': 'FlatMatch-e',
  'flatmatch_fix': 'FlatMatch (Fix label)',
  'supervised': 'Fully-Supervised',
  'sharp_labeled': 'sharp. on D^l',
  'sharp_unlabeled': 'sharp. on D^u',
  'sharp_all': 'sharp. on D^l ∪ D^u',
  'flatmatch_last': 'w/o EMA',
  'adamatch': 'AdaMatch',
  'crmatch': 'CRMatch',
  'comatch': 'CoMatch',
  'simmatch': 'SimMatch',
}

TITLES = {
  'table1': 'Table 1: CIFAR-10, CIFAR-100, SVHN and STL-10',
  'combination': 'Supplement: other methods with FlatMatch on CIFAR-10',
  'ablation': 'Ablation on CIFAR-100',
  'imagenet30': 'Supplement: ImageNet30',
  'imagenet': 'Supplement: ImageNet, 100 labels a class',
  'usb': 'Methods that the paper leaves out, as USB reports them',
}

TABLES = {
  'table1': """
cifar10                 10          40         250        4000
pi_model        79.18±1.11  74.34±1.76  46.24±1.29  13.13±0.59
pseudo_label    80.21±0.55  74.61±0.26  46.49±2.20  15.08±0.19
vat             79.81±1.17  74.66±2.12  41.03±1.79  10.51±0.12
mean_teacher    76.37±0.44  70.09±1.60  37.46±3.30   8.10±0.21
mixmatch        65.76±7.06  36.19±6.48  13.63±0.59   6.66±0.26
remixmatch      20.77±7.48   9.88±1.03   6.30±0.05   4.84±0.01
uda            34.53±10.69  10.62±3.75   5.16±0.06   4.29±0.07
fixmatch        24.79±7.65   7.47±0.28   4.86±0.05   4.21±0.08
dash           27.28±14.09   8.93±3.11   5.16±0.23   4.36±0.11
mpl             23.55±6.01   6.62±0.91   5.76±0.24   4.55±0.04
flexmatch      13.85±12.04   4.97±0.06   4.98±0.09   4.19±0.01
softmatch                -   4.91±0.12   4.82±0.09   4.04±0.02
freematch        8.07±4.24   4.90±0.04   4.88±0.18   4.10±0.02
flatmatch       15.23±8.67   5.58±2.36   4.22±1.14   3.61±0.49
flatmatch_e     15.69±6.35   5.63±1.87   4.53±1.85   3.57±0.50
flatmatch_fix    7.36±5.62   4.89±1.24   3.90±1.72   3.61±0.49

cifar10           all
supervised  4.62±0.05

cifar100              400        2500       10000
pi_model       86.96±0.80  58.80±0.66  36.65±0.00
pseudo_label   87.45±0.85  57.74±0.28  36.55±0.24
vat            85.20±1.40  46.84±0.79  32.14±0.19
mean_teacher   81.11±1.44  45.17±1.06  31.75±0.23
mixmatch       67.59±0.66  39.76±0.48  27.78±0.29
remixmatch     42.75±1.05  26.03±0.35  20.02±0.27
uda            46.39±1.59  27.73±0.21  22.49±0.23
fixmatch       46.42±0.82  28.03±0.16  22.20±0.12
dash           44.82±0.96  27.15±0.22  21.88±0.07
mpl            46.26±1.84  27.71±0.19  21.74±0.09
flexmatch      39.94±1.62  26.49±0.20  21.90±0.15
softmatch      37.10±0.77  26.66±0.25  22.03±0.03
freematch      37.98±0.42  26.47±0.20  21.68±0.03
flatmatch      38.76±1.62  25.38±0.85  19.01±0.43
flatmatch_e    38.98±1.53  25.62±0.88  19.78±0.89
flatmatch_fix  36.97±0.95  25.38±0.85  19.01±0.43

cifar100           all
supervised  19.30±0.09

svhn                   40         250       1000
pi_model       67.48±0.95  13.30±1.12  7.16±0.11
pseudo_label    64.61±5.6  15.59±0.95  9.40±0.32
vat            74.75±3.38   4.33±0.12  4.11±0.20
mean_teacher   36.09±3.98   3.45±0.03  3.27±0.05
mixmatch       30.60±8.39   4.56±0.32  3.69±0.37
remixmatch     24.04±9.13   6.36±0.22  5.16±0.31
uda             5.12±4.27   1.92±0.05  1.89±0.01
fixmatch        3.81±1.18   2.02±0.02  1.96±0.03
dash            2.19±0.18   2.04±0.02  1.97±0.01
mpl             9.33±8.02   2.29±0.04  2.28±0.02
flexmatch       8.19±3.20   6.59±2.29  6.72±0.30
softmatch       2.33±0.25           -  2.01±0.01
freematch       1.97±0.02   1.97±0.01  1.96±0.03
flatmatch       2.46±0.06   1.43±0.05  1.41±0.04
flatmatch_e     2.66±0.09   1.47±0.08  1.46±0.07
flatmatch_fix   2.14±0.05   1.43±0.05  1.41±0.04

svhn              all
supervised  2.13±0.01

stl10                  40        1000
pi_model       74.31±0.85  32.78±0.40
pseudo_label   74.68±0.99  32.64±0.71
vat            74.74±0.38  37.95±1.12
mean_teacher   71.72±1.45  33.90±1.37
mixmatch       54.93±0.96  21.70±0.68
remixmatch     32.12±6.24   6.74±0.14
uda            37.42±8.44   6.64±0.17
fixmatch       35.97±4.14   6.25±0.33
dash           34.52±4.30   6.39±0.56
mpl            35.76±4.83   6.66±0.00
flexmatch      29.15±4.16   5.77±0.18
softmatch      21.42±3.48   5.73±0.24
freematch      15.56±0.55   5.63±0.15
flatmatch      16.20±4.34   4.82±1.21
flatmatch_e    16.32±4.64   5.03±1.06
flatmatch_fix  14.96±0.67   4.82±1.21

stl10       all
supervised    -
""",
  'combination': """
cifar10                         40
fixmatch                 7.47±0.28
fixmatch+flatmatch_fix   6.50±1.25
dash                     8.93±3.11
dash+flatmatch_fix       6.73±2.49
flexmatch                4.97±0.06
flexmatch+flatmatch_fix  4.47±0.92
softmatch                4.91±0.12
softmatch+flatmatch_fix  4.89±1.32
freematch                4.90±0.04
flatmatch_fix            4.89±1.24

cifar10                    250       4000
fixmatch             4.86±0.05  4.21±0.08
fixmatch+flatmatch   4.27±2.15  3.92±1.65
dash                 5.16±0.23  4.36±0.11
dash+flatmatch       4.48±1.56  4.02±1.30
flexmatch            4.98±0.09  4.19±0.01
flexmatch+flatmatch  4.25±1.37  3.88±0.75
softmatch            4.82±0.09  4.04±0.02
softmatch+flatmatch  3.98±1.14  3.84±0.86
freematch            4.88±0.18  4.10±0.02
flatmatch_fix        3.90±1.72  3.61±0.49
""",
  'ablation': """
cifar100                400        2500       10000
sharp_labeled    42.63±0.34  26.85±0.45  21.79±0.24
sharp_unlabeled  49.45±2.76  36.30±2.01  27.05±2.98
sharp_all        43.88±1.64  27.26±1.62  23.42±1.77
flatmatch        38.76±1.62  25.38±0.85  19.01±0.43
flatmatch_last   40.64±0.97  29.44±1.56  23.23±1.28
flatmatch_e      38.98±1.53  25.62±0.88  19.78±0.89
""",
  'imagenet30': """
imagenet30        1500       3000
fixmatch    12.48±0.67  8.25±0.54
dash        13.29±1.26  8.79±0.42
flexmatch   11.48±0.52  8.04±0.75
softmatch   10.81±0.40  7.78±0.61
freematch   10.34±0.46  7.21±0.19
flatmatch    9.71±1.55  6.77±1.27
""",
  'imagenet': """
imagenet     100000,model=resnet_50  100000,model=vit_base_16
flatmatch                     38.70                     21.57
flatmatch_e                   39.92                     22.07
freematch                     40.57                     23.55
flexmatch                     41.95                     23.78
fixmatch                      43.66                     25.52
""",
  'usb': """
cifar10           40        250       4000
adamatch   5.05±0.04  5.01±0.11  4.29±0.06
crmatch   10.13±2.09  4.67±0.02  3.81±0.16
comatch    5.44±0.05  5.33±0.12  4.29±0.04
simmatch   5.18±0.15  4.99±0.12  4.51±0.08

svhn             40        250       1000
adamatch  2.32±0.17  2.14±0.10  2.04±0.02
crmatch   7.14±2.28  1.88±0.04  1.91±0.02
comatch   9.51±5.59  2.21±0.20  1.96±0.07
simmatch  3.19±0.74  2.26±0.11  2.08±0.06
""",
}
