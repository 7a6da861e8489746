"""Pages about runs in a real browser, as people look at them."""

import os
import pathlib

import browser as browser_lib
from PIL import Image
import pytest
import test_next_steps
import test_report

from flatmatch_jax.report import comparison, runs, single

PHONE, DESKTOP = (390, 844), (1280, 900)


@pytest.fixture(scope='module')
def browser():
  program = browser_lib.find()
  if program is None:
    remedy = (
      f'No browser found ({", ".join(browser_lib.NAMES)}); install one, such '
      'as by `apt-get install chromium`.'
    )
    if os.environ.get('CI') == 'true':
      pytest.fail(remedy)
    pytest.skip(remedy)
  with browser_lib.start(program) as browser:
    yield browser


@pytest.fixture(scope='module')
def pages(tmp_path_factory) -> dict[str, pathlib.Path]:
  """A run, a run of many classes with long names, and several runs."""
  folder = tmp_path_factory.mktemp('pages')
  many = [f'a class with a long name {i}' for i in range(30)]
  texts = {}
  for name, names in (('one', test_report.NAMES), ('many', many)):
    files = test_report.write_run(folder / name, names=names)
    (files.path / 'analysis').mkdir()
    Image.new('RGB', (1500, 400)).save(files.path / 'analysis' / 'wide.png')
    found = test_report.fake_predictions(len(names))
    texts[name] = single.render(
      runs.read(files.path), found, '', test_next_steps.ADVICE
    )
  several = []
  methods = ('flatmatch', 'freematch', 'fixmatch', 'flexmatch', 'softmatch')
  for number, method in enumerate((*methods, 'flatmatch_e', 'uda')):
    for seed in (0, 1):
      several.append(folder / f'{method}-{seed}')
      test_report.write_run(
        several[-1],
        method=method,
        seed=seed,
        offset=(3 * number + seed) % 5,
        dataset='cifar10',
        done=method != 'uda',
      )
  groups = comparison.group(list(map(runs.read, several)))
  texts['several'] = comparison.render(groups, {'a.csv': 'b', 'a.tex': 'c'})
  paths = {}
  for name, text in texts.items():
    paths[name] = folder / f'{name}.html'
    paths[name].write_text(text)
  return paths


# Of everything that must be seen: where it is and whether its own box, which
# scrolls, holds it.
SEEN = """
[...document.querySelectorAll('svg[role], img, table, dd, h1, h2, h3, pre')]
  .map(element => {
    const box = element.getBoundingClientRect();
    return {
      what: element.outerHTML.slice(0, 60),
      left: box.left, right: box.right, width: box.width, height: box.height,
      scrolls: !!element.closest('.scroll'),
      loaded: element.tagName !== 'IMG' || element.naturalWidth > 0,
    };
  })
"""

# Texts of a chart that lie over each other.
OVERLAPS = """
[...document.querySelectorAll('svg[role]')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(
    ([b, q]) => p.left < q.right && q.left < p.right
      && p.top + 2 < q.bottom && q.top + 2 < p.bottom
  ).map(([b]) => `${a} / ${b}`));
})
"""

# Contrast of texts with what is behind them, by the formula of WCAG 2.
CONTRASTS = """
(() => {
  const context = document.createElement('canvas').getContext('2d');
  const linear = c => (c /= 255) <= .03928 ? c / 12.92
    : ((c + .055) / 1.055) ** 2.4;
  const light = (...colors) => {
    for (const color of colors) {
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
    return .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  };
  // Backgrounds that let shine through are painted over each other.
  const behind = element => {
    const colors = [];
    for (let e = element; e; e = e.parentElement) {
      colors.unshift(getComputedStyle(e).backgroundColor);
    }
    return light(...colors);
  };
  const what = 'h1, .status, .note, dt, dd, svg text, th, td, .legend li, '
    + 'nav a, pre, figcaption p, .tile b, .tile small, .downloads a';
  return [...document.querySelectorAll(what)].map(element => {
    const style = getComputedStyle(element);
    const color = element.tagName === 'text' ? style.fill : style.color;
    const [a, b] = [light(color), behind(element)];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05),
            element.outerHTML.slice(0, 80)];
  });
})()
"""


@pytest.mark.parametrize('name', ['one', 'many', 'several'])
@pytest.mark.parametrize(
  ('size', 'dark'), [(PHONE, False), (PHONE, True), (DESKTOP, True)]
)
def test_everything_is_seen(browser, pages, name, size, dark):
  browser.look(*size, dark)
  browser.open(pages[name])
  assert browser.complaints() == []
  assert browser.requests() == []
  width = browser.evaluate('document.documentElement.clientWidth')
  # The page itself does not scroll sideways.
  assert browser.evaluate('document.documentElement.scrollWidth') == width
  seen = browser.evaluate(SEEN)
  assert len(seen) > 15
  for element in seen:
    assert element['loaded'], element
    assert element['width'] > 0, element
    assert element['height'] > 0, element
    if not element['scrolls']:
      assert element['left'] >= 0, element
      assert element['right'] <= width, element
  assert browser.evaluate(OVERLAPS) == []
  contrasts = browser.evaluate(CONTRASTS)
  assert min(contrasts) > [4.5], min(contrasts)


# For 5 to 11 tiles, how many cells of the last row are taken.
LAST_ROWS = """
(() => {
  const list = document.querySelector('.tiles'), tile = list.firstChild;
  return [5, 6, 7, 8, 9, 10, 11].map(number => {
    list.replaceChildren(
      ...Array.from({length: number}, () => tile.cloneNode(true)));
    const tops = [...list.children].map(t => t.getBoundingClientRect().top);
    return tops.filter(top => top === tops.at(-1)).length;
  });
})()
"""


@pytest.mark.parametrize('width', [390, 700, 1000, 1280])
def test_no_tile_is_alone_in_the_last_row(browser, pages, width):
  browser.look(width, 900)
  browser.open(pages['one'])
  assert min(browser.evaluate(LAST_ROWS)) > 1


def test_scheme_is_the_one_the_user_prefers(browser, pages):
  colors = []
  for dark in (False, True):
    browser.look(*DESKTOP, dark)
    browser.open(pages['one'])
    color = 'getComputedStyle(document.body).backgroundColor'
    numbers = browser.evaluate(color)[4:-1].split(',')
    colors.append(sum(map(int, numbers)) / 3)
  assert colors[0] > 200
  assert colors[1] < 50


VALUES = """
[...document.querySelector('table.sortable').tBodies[0].rows].map(
  row => row.cells[%d].dataset.value ?? row.cells[%d].textContent)
"""
SORTED = """
[...document.querySelectorAll('table.sortable th[aria-sort]')].map(
  head => head.getAttribute('aria-sort')).filter(sort => sort !== 'none')
"""


def test_table_is_sorted_by_the_keyboard_and_by_clicks(browser, pages):
  browser.look(*DESKTOP)
  browser.open(pages['several'])
  head = browser.evaluate(
    "[...document.querySelectorAll('th button')].map(b => b.textContent)"
  )
  column = head.index('last, %')
  values = lambda column: browser.evaluate(VALUES % (column, column))
  before = values(column)
  # Tab reaches the header, Enter sorts, and once more the other way.
  browser.evaluate(
    f"document.querySelectorAll('th button')[{column - 1}].focus()"
  )
  browser.press('Tab', 9)
  focused = browser.evaluate('document.activeElement.textContent')
  assert focused == 'last, %'
  numbers = sorted(float(value) for value in before if value)
  assert before != [*map(str, numbers), '']
  browser.press('Enter', 13)
  *first, last = values(column)
  assert list(map(float, first)) == numbers
  assert last == ''  # The unfinished one.
  assert browser.evaluate(SORTED) == ['ascending']
  browser.press('Enter', 13)
  *first, last = values(column)
  assert list(map(float, first)) == numbers[::-1]
  assert last == ''
  assert browser.evaluate(SORTED) == ['descending']
  browser.evaluate("document.querySelector('th button').click()")
  assert values(0) == sorted(values(0))
  assert browser.evaluate(SORTED) == ['ascending']
  assert browser.complaints() == []


@pytest.mark.parametrize('size', [PHONE, DESKTOP])
def test_pointer_shows_values_of_lines(browser, pages, size):
  browser.look(*size)
  browser.open(pages['one'])
  box = browser.evaluate("""
    (() => {
      const svg = document.querySelector('svg[data-lines]');
      svg.scrollIntoView({block: 'center', behavior: 'instant'});
      const box = svg.getBoundingClientRect();
      return [box.left, box.top, box.width, box.height];
    })()
  """)
  left, top, width, height = box
  # The place of step 300 of 300, where the error is 80 / 30.
  browser.move(left + width * 388 / 400, top + height / 2)
  tip = browser.evaluate("document.querySelector('.tip')?.textContent")
  assert tip == 'step 300test, averaged weights: 2.667test, raw weights: 2.833'
  inside = browser.evaluate("""
    (() => {
      const tip = document.querySelector('.tip').getBoundingClientRect();
      return tip.left >= 0 && tip.right <= innerWidth;
    })()
  """)
  assert inside
  browser.move(2, 2)
  assert browser.evaluate("document.querySelector('.tip')") is None
  assert browser.complaints() == []


def test_page_needs_no_script(browser, pages):
  browser.look(*PHONE)
  browser.call('Emulation.setScriptExecutionDisabled', value=True)
  try:
    browser.open(pages['several'])
    seen = browser.evaluate(SEEN)
  finally:
    browser.call('Emulation.setScriptExecutionDisabled', value=False)
  assert len(seen) > 10
  assert all(element['width'] > 0 < element['height'] for element in seen)


def test_policy_stops_scripts_that_are_not_ours(browser, pages, tmp_path):
  """Even if a text had not been escaped."""
  page = tmp_path / 'page.html'
  text = pages['one'].read_text()
  attack = '<script>window.hurt = 1</script><img src="https://example.org/a">'
  page.write_text(text.replace('</main>', f'{attack}</main>'))
  browser.open(page)
  assert browser.evaluate('window.hurt') is None
  assert len(browser.complaints()) >= 2
