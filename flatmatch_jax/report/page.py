"""HTML in which all text is escaped, and the frame of a page."""

import base64
import hashlib
import html
import io
import pathlib

import numpy as np
from PIL import Image

_HERE = pathlib.Path(__file__).parent
_VOID = ('img', 'link', 'meta')
_SMALL = 64  # Pixels: such images are enlarged without blurring.


class Html(str):
  """Text that is markup already. Any other text is escaped where it enters."""


def escape(text) -> Html:
  return text if isinstance(text, Html) else Html(html.escape(str(text)))


def join(*parts) -> Html:
  return Html('\n'.join(escape(part) for part in parts if part))


def tag(name: str, /, *children, **attributes) -> Html:
  """An element. `class_` is class, and aria_label is aria-label."""
  written = ''
  for key, value in attributes.items():
    if value is not None:
      key = key.rstrip('_').replace('_', '-')
      written += f' {key}="{html.escape(str(value))}"'
  if name in _VOID:
    return Html(f'<{name}{written}>')
  inner = ''.join(escape(child) for child in children if child is not None)
  return Html(f'<{name}{written}>{inner}</{name}>')


def note(*text) -> Html:
  return tag('p', *text, class_='note')


def alarm(title: str, items: list, remedies, failed: bool = True) -> Html:
  """A box about what went wrong; '' if there are no items."""
  if not items:
    return Html('')
  return tag(
    'div',
    tag('h3', title),
    tag('ul', *[tag('li', item) for item in items]),
    join(*[tag('p', text) for text in remedies]),
    class_='alarm failed' if failed else 'alarm',
  )


def card(title: str, *children, note: str = '', wide: bool = False) -> Html:
  return tag(
    'figure',
    tag('figcaption', tag('h3', title), note and tag('p', note)),
    *children,
    class_='card wide' if wide else 'card',
  )


def grid(*cards) -> Html:
  """Cards beside each other, as many as fit; empty ones are left out."""
  there = [card for card in cards if card]
  return tag('div', *there, class_='grid') if there else Html('')


def scrolling(label: str, *children, kind: str = '') -> Html:
  """A box that scrolls by itself, also with the keyboard."""
  return tag(
    'div',
    *children,
    class_=f'scroll {kind}'.strip(),
    tabindex=0,
    role='region',
    aria_label=label,
  )


def table(head: list, rows: list[list], label: str, sortable=False) -> Html:
  """A table whose first cells name their rows; numbers align on the right.

  A cell is what it shows, or (what it shows, the number it is sorted by).
  """
  titles = [
    tag(
      'th',
      tag('button', title, type='button') if sortable else title,
      scope='col',
      class_='number' if rows and _is_number(rows[0][i]) else None,
      aria_sort='none' if sortable else None,
    )
    for i, title in enumerate(head)
  ]
  body = [tag('tr', *map(_cell, range(len(row)), row)) for row in rows]
  content = tag(
    'table',
    tag('thead', tag('tr', *titles)),
    tag('tbody', *body),
    class_='sortable' if sortable else None,
  )
  return scrolling(label, content)


def _is_number(cell):
  return isinstance(cell, int | float | tuple)


def _cell(number, cell):
  shown, value = cell if isinstance(cell, tuple) else (cell, cell)
  return tag(
    'td' if number else 'th',
    shown,
    scope=None if number else 'row',
    class_='number' if _is_number(cell) else None,
    data_value=value if _is_number(cell) else None,
  )


def picture(pixels: np.ndarray, alt: str) -> Html:
  """An image of uint8 [H, W, C] inside the page; large ones as photos."""
  buffer = io.BytesIO()
  small = max(pixels.shape[:2]) <= _SMALL
  kind = 'png' if small else 'jpeg'
  Image.fromarray(pixels.squeeze()).save(buffer, format=kind, quality=90)
  return tag(
    'img',
    src=data_uri(f'image/{kind}', buffer.getvalue()),
    alt=alt,
    class_='pixels' if small else None,
  )


def data_uri(kind: str, content: bytes) -> str:
  return f'data:{kind};base64,{base64.b64encode(content).decode()}'


def document(title: str, header: Html, sections: dict[str, Html]) -> str:
  """A page that asks for nothing outside itself; empty sections are left out.

  Its policy lets no other script run than the one whose checksum it names.
  """
  style = (_HERE / 'style.css').read_text()
  script = (_HERE / 'script.js').read_text()
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{digest}'"
  )
  head = tag(
    'head',
    tag('meta', charset='utf-8'),
    tag('meta', http_equiv='Content-Security-Policy', content=policy),
    tag('meta', name='viewport', content='width=device-width'),
    tag('meta', name='color-scheme', content='light dark'),
    tag('link', rel='icon', href='data:,'),
    tag('title', title),
    tag('style', Html(style)),
  )
  named = {
    name.lower().rstrip('?').replace(' ', '-'): (name, content)
    for name, content in sections.items()
    if content
  }
  links = [tag('a', name, href=f'#{id}') for id, (name, _) in named.items()]
  parts = [
    tag('section', tag('h2', name), content, id=id)
    for id, (name, content) in named.items()
  ]
  body = tag(
    'body',
    header,
    tag('nav', *links, aria_label='Sections'),
    tag('main', *parts),
    tag('script', Html(script)),
  )
  page = tag('html', head, body, lang='en')
  return f'<!doctype html>\n{page}\n'
