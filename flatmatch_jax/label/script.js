'use strict';
// The server knows what is labeled; the page shows some images and sends keys.
const token = new URLSearchParams(location.search).get('token');
const byId = id => document.getElementById(id);
const CELLS = 24, AHEAD = 4;  // Images in the grid; shown one, and to come.
const KEYS = '1234567890';

let state = {images: [], classes: []};
let grid = false, cursor = 0, waiting = false, lost = false, timer = 0;
const chosen = new Set(), actions = [], figures = new Map();

function element(name, text = '', kind = '') {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = kind;
  return made;
}

function say(text, bad = false) {
  const toast = byId('toast');
  clearTimeout(timer);
  toast.textContent = text;
  toast.className = bad ? 'bad' : '';
  toast.hidden = !text;
  if (!lost) timer = setTimeout(() => { toast.hidden = true; }, bad ? 8000 : 2500);
}

// Sends a request; keys pressed meanwhile would meet an image not yet seen.
async function ask(action, body = {}) {
  if (waiting) return;
  waiting = true;
  try {
    const answer = await fetch(`/${action}`, {
      method: 'POST',
      headers: {'Content-Type': 'application/json', 'X-Token': token},
      body: JSON.stringify({
        count: grid ? CELLS : AHEAD,
        shown: state.images.map(image => image.id),
        ...body,
      }),
    });
    const found = await answer.json();
    lost = false;
    if (found.error) {
      say(found.error, true);
    } else {
      state = found;
      if (found.action !== null) actions.push(found.action);
      if (found.notes.length) say(found.notes.join(' '), true);
    }
    return !found.error;
  } catch {
    lost = true;
    say('The program has ended. Every label is saved; start it again, and ' +
      'open the new address.', true);
  } finally {
    waiting = false;
    draw();
  }
}

const show = () => ask('show');

function targets() {
  const here = state.images.filter(image => chosen.has(image.id));
  return here.length ? here : state.images.slice(cursor, cursor + 1);
}

async function label(pairs, what) {
  if (!pairs.length) return;
  if (await ask('label', {labels: pairs})) done(what);
}

function done(what) {
  chosen.clear();
  if (!state.notes.length) say(what);
  draw();
}

function give(number) {
  const images = targets(), found = state.classes[number];
  if (!found) return say(`No class has this key yet; N adds one.`);
  label(images.map(image => [image.id, number]), count(images, found.name));
}

function accept(all) {
  const images = (all ? state.images : targets()).filter(
    image => image.label !== null);
  if (!images.length) return say('There is no guess to accept.');
  const names = new Set(images.map(image => state.classes[image.label].name));
  label(images.map(image => [image.id, image.label]),
    count(images, names.size > 1 ? 'as guessed' : [...names][0]));
}

const count = (images, name) =>
  images.length > 1 ? `${images.length} × ${name}` : name;

async function skip() {
  const images = targets();
  if (images.length &&
      await ask('skip', {images: images.map(image => image.id)})) {
    done(count(images, 'skipped'));
  }
}

async function undo() {
  const last = actions.length ? actions[actions.length - 1] : null;
  const worked = await ask('undo', {action: last});
  if (worked === undefined) return;
  actions.pop();  // Another tab may have undone it.
  if (worked) {
    cursor = 0;
    done('Undone');
  }
}

function toggle(to = !grid) {
  if (waiting) return;
  // The image under the cursor stays in sight.
  const [here] = state.images.splice(cursor, 1);
  if (here) state.images.unshift(here);
  grid = to;
  cursor = 0;
  chosen.clear();
  show();
}

function choose(image) {
  if (!chosen.delete(image.id)) chosen.add(image.id);
  draw();
}

function columns() {
  return getComputedStyle(byId('stage')).gridTemplateColumns.split(' ').length;
}

function move(by) {
  cursor = Math.max(0, Math.min(state.images.length - 1, cursor + by));
  draw();
  byId('stage').children[cursor]?.scrollIntoView({block: 'nearest'});
}

// Drawing.

function figure(image) {
  const key = `${image.id} ${grid}`;
  if (!figures.has(key)) {
    const made = element('figure'), picture = new Image();
    picture.alt = image.name;
    picture.onload = () => picture.classList.toggle(
      'tiny', Math.max(picture.naturalWidth, picture.naturalHeight) <= 64);
    picture.onerror = () => { if (!lost) setTimeout(show); };
    picture.src = `/image/${image.id}?size=${grid ? 'small' : 'large'}&token=${token}`;
    const caption = element('figcaption');
    caption.append(element('span', image.name), element('span', '', 'guess'));
    caption.firstChild.title = image.name;
    made.append(picture, caption);
    made.onclick = () => {
      if (!grid) return;
      cursor = state.images.findIndex(other => other.id === image.id);
      choose(image);
    };
    made.ondblclick = () => { if (grid) { chosen.clear(); toggle(false); } };
    figures.set(key, made);
  }
  const made = figures.get(key);
  made.classList.toggle('cursor', grid && state.images[cursor]?.id === image.id);
  made.classList.toggle('chosen', chosen.has(image.id));
  made.querySelector('.guess').textContent = image.label === null ? '' :
    grid ? state.classes[image.label].name : guess(image);
  return made;
}

const guess = image =>
  `${state.classes[image.label].name} ${Math.round(100 * image.confidence)}%`;

function draw() {
  cursor = Math.max(0, Math.min(cursor, state.images.length - 1));
  const shown = state.images.map(figure);  // The next ones load meanwhile.
  const kept = new Set(shown);
  for (const [key, made] of figures) if (!kept.has(made)) figures.delete(key);
  const stage = byId('stage');
  stage.className = shown.length ? (grid ? 'grid' : 'one') : 'done';
  if (shown.length) {
    const seen = grid ? shown : shown.slice(0, 1);
    if (seen.length !== stage.children.length ||
        seen.some((made, number) => made !== stage.children[number])) {
      stage.replaceChildren(...seen);
    }
  } else if (state.folder) {
    drawEnd(stage);
  }
  drawStatus();
  drawClasses();
}

function drawEnd(stage) {
  const again = element('button', `Show the ${state.skipped} skipped again`);
  again.onclick = () => ask('again');
  stage.replaceChildren(
    element('h2', 'No image is left to label.'),
    element('p', 'To train a model on them:'),
    element('code', 'python main.py --config configs/folder.py ' +
      `--config.data_dir=${state.folder} --workdir runs/mine`),
    ...(state.skipped ? [again] : []));
}

function drawStatus() {
  if (!state.folder) return;
  const number = value => value.toLocaleString('en');
  byId('folder').textContent = state.folder;
  byId('status').textContent = [
    `${number(state.labeled)} labeled`,
    `${number(state.pending)} to do`,
    state.skipped && `${number(state.skipped)} skipped`,
    chosen.size && `${chosen.size} selected`,
    state.busy,
  ].filter(Boolean).join(' · ');
  const progress = byId('progress');
  progress.max = Math.max(1, state.labeled + state.pending + state.skipped);
  progress.value = state.labeled;
  byId('grid').setAttribute('aria-pressed', grid);
  byId('skip').disabled = !state.images.length;
  byId('unreadable').textContent = state.unreadable.length ?
    `Cannot be read, and left where they are: ${state.unreadable.join('; ')}` :
    '';
}

function drawClasses() {
  const here = targets(), guessed = here.length === 1 ? here[0].label : null;
  byId('classes').replaceChildren(...state.classes.map((found, number) => {
    const button = element('button', '', number === guessed ? 'guess' : '');
    button.type = 'button';
    button.append(
      element('kbd', KEYS[number] ?? '·'), element('span', found.name),
      element('small', found.count));
    button.onclick = () => { button.blur(); give(number); };
    return button;
  }));
  byId('names').replaceChildren(...state.classes.map(found => {
    const option = element('option');
    option.value = found.name;
    return option;
  }));
  const guesses = state.images.some(image => image.label !== null);
  const help = [
    state.classes.length && ['1 … 0', 'give a class'],
    ['N', 'type a class'],
    guesses && ['Enter', 'accept the guess'],
    guesses && grid && ['⇧ Enter', 'accept all guesses'],
    grid && ['← → ↑ ↓', 'move'],
    grid && ['Space', 'select'],
  ].filter(Boolean);
  byId('help').replaceChildren(...help.flatMap(([key, text]) => {
    const term = element('dt');
    term.append(element('kbd', key));
    return [term, element('dd', text)];
  }));
}

// Keys and buttons.

const LETTERS = {
  s: skip,
  u: undo,
  g: () => toggle(),
  n: () => byId('name').focus(),
  ArrowLeft: () => grid && move(-1),
  ArrowRight: () => grid && move(1),
  ArrowUp: () => grid && move(-columns()),
  ArrowDown: () => grid && move(columns()),
  ' ': () => grid && state.images.length && choose(state.images[cursor]),
  Escape: () => { chosen.clear(); draw(); },
};

document.addEventListener('keydown', event => {
  const {key, target} = event;
  if (target === byId('name')) {
    if (key === 'Escape') target.blur();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && key === 'z') {
    event.preventDefault();
    return undo();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat &&
      !key.startsWith('Arrow')) return;
  const onButton = target.tagName === 'BUTTON';
  if (onButton && (key === 'Enter' || key === ' ')) return;
  const number = KEYS.indexOf(key);
  const act = number >= 0 ? () => give(number) :
    key === 'Enter' ? () => accept(grid && event.shiftKey) :
    LETTERS[key] ?? LETTERS[key.toLowerCase()];
  if (!act) return;
  event.preventDefault();
  act();
});

byId('other').addEventListener('submit', async event => {
  event.preventDefault();
  const input = byId('name'), name = input.value.trim(), images = targets();
  if (!name || !images.length) return;
  const body = {name, images: images.map(image => image.id)};
  if (await ask('label', body)) {
    input.value = '';
    input.blur();
    done(count(images, name));
  }
});

for (const [id, act] of Object.entries({grid: () => toggle(), skip, undo})) {
  byId(id).addEventListener('click', () => { byId(id).blur(); act(); });
}

setInterval(() => { if (state.busy) show(); }, 1500);
document.addEventListener('visibilitychange', () => {
  if (!document.hidden) show();  // Another tab may have gone on.
});
show();
