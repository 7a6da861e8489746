'use strict';
// The values of lines under the pointer, and tables sorted by a column.
// Without it the page says the same, and neither.

const SVG = 'http://www.w3.org/2000/svg';
const [LEFT, RIGHT, TOP, BOTTOM, WIDTH] = [46, 388, 26, 206, 400];

function show(svg, lines, until, event) {
  const box = svg.getBoundingClientRect();
  const place = (event.clientX - box.left) / box.width * WIDTH;
  const wanted = (place - LEFT) / (RIGHT - LEFT) * until;
  const steps = [...new Set(lines.flatMap(line => line.x))];
  const step = steps.reduce(
    (a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
  hide(svg);
  const x = LEFT + step / until * (RIGHT - LEFT);
  const cursor = document.createElementNS(SVG, 'line');
  const ends = {x1: x, x2: x, y1: TOP, y2: BOTTOM, class: 'cursor'};
  for (const [key, value] of Object.entries(ends)) {
    cursor.setAttribute(key, value);
  }
  svg.append(cursor);
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.append(`step ${step.toLocaleString('en')}`);
  for (const line of lines) {
    const value = line.y[line.x.indexOf(step)];
    if (value === undefined || value === null) continue;
    const row = document.createElement('div');
    const mark = document.createElement('i');
    mark.className = line.style;
    row.append(mark, `${line.name}: ${value.toLocaleString('en')}`);
    tip.append(row);
  }
  svg.parentElement.append(tip);
  const card = svg.parentElement.getBoundingClientRect();
  const shift = box.left - card.left + x / WIDTH * box.width;
  const room = card.width - tip.offsetWidth - 4;
  const side = x < WIDTH / 2 ? shift + 12 : shift - tip.offsetWidth - 12;
  tip.style.left = `${Math.max(4, Math.min(side, room))}px`;
  tip.style.top = `${box.top - card.top + 20}px`;
}

function hide(svg) {
  svg.querySelector('.cursor')?.remove();
  svg.parentElement.querySelector('.tip')?.remove();
}

for (const svg of document.querySelectorAll('svg[data-lines]')) {
  const lines = JSON.parse(svg.dataset.lines);
  const until = Number(svg.dataset.until);
  for (const name of ['pointermove', 'pointerdown']) {
    svg.addEventListener(name, event => show(svg, lines, until, event));
  }
  svg.addEventListener('pointerleave', () => hide(svg));
}

function sort(table, column, head) {
  const up = head.getAttribute('aria-sort') !== 'ascending';
  for (const other of table.querySelectorAll('th[aria-sort]')) {
    other.setAttribute('aria-sort', 'none');
  }
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const body = table.tBodies[0];
  const value = row => {
    const cell = row.cells[column];
    return cell.dataset.value ?? cell.textContent;
  };
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    // What has no value stays at the end.
    if ((x === '') !== (y === '')) return x === '' ? 1 : -1;
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, 'en') : x - y;
    return up ? order : -order;
  };
  body.append(...[...body.rows].sort(compare));
}

for (const table of document.querySelectorAll('table.sortable')) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.firstElementChild.addEventListener(
      'click', () => sort(table, column, head));
  });
}
