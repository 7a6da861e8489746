'use strict';
// Images come in as in flatmatch_jax/data/images.py: upright, on white paper,
// scaled as Pillow does until they just cover, cut to the centre. Of a tall
// image Pillow may scale the columns first, and differ by one level.
const SHOWN = 5;
const LARGEST = 4096;  // Pixels per side that every browser's canvas can hold.
const BITS = 22;  // Pillow's fixed point.

const $ = id => document.getElementById(id);
const about = JSON.parse($('description').textContent);
const [height, width, channels] = about.image_shape;

async function unpack(id) {
  const text = atob($(id).textContent.trim());
  $(id).remove();
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const unzipped = new Blob([bytes]).stream().pipeThrough(
    new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(unzipped).arrayBuffer());
}

async function load() {
  const code = new Blob([await unpack('runtime')], {type: 'text/javascript'});
  const ort = await import(URL.createObjectURL(code));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = await unpack('wasm');
  const session = await ort.InferenceSession.create(await unpack('model'));
  return async pixels => {
    const shape = [1, height, width, channels];
    const images = new ort.Tensor('uint8', pixels, shape);
    return (await session.run({images})).probabilities.data;
  };
}

function bicubic(x) {
  x = Math.abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -.5 : 0;
}

// For each of `count` pixels between two places of a row of `size`: the first
// pixel that it is made of, and the weights of that and the following ones.
function weights(size, start, stop, count) {
  const scale = Math.fround(stop - start) / count, wide = Math.max(scale, 1);
  return Array.from({length: count}, (_, i) => {
    const centre = start + (i + .5) * scale;
    const first = Math.max(0, Math.trunc(centre - 2 * wide + .5));
    const last = Math.min(size, Math.trunc(centre + 2 * wide + .5));
    const found = [];
    for (let x = first; x < last; x++) {
      found.push(bicubic((x - centre + .5) * (1 / wide)));
    }
    const total = found.reduce((a, b) => a + b, 0);
    return {first, weights: found.map(w => {
      const fixed = w / total * 2 ** BITS;
      return Math.trunc(fixed + (fixed < 0 ? -.5 : .5));
    })};
  });
}

// Scales one axis of bytes [before, size, after] to that of `made`.
function scaled(bytes, before, size, after, made) {
  const out = new Uint8ClampedArray(before * made.length * after);
  for (let i = 0, to = 0; i < before; i++) {
    for (const {first, weights} of made) {
      for (let j = 0; j < after; j++, to++) {
        let sum = 2 ** (BITS - 1), from = (i * size + first) * after + j;
        for (const weight of weights) {
          sum += bytes[from] * weight;
          from += after;
        }
        out[to] = Math.floor(sum / 2 ** BITS);
      }
    }
  }
  return out;
}

// Bytes [rows, columns, channels] scaled to cover, without what is outside.
function fit(bytes, rows, columns, [coverHeight, coverWidth]) {
  const wanted = coverWidth / coverHeight, is = columns / rows;
  const wide = is > wanted ? wanted * rows : columns;
  const high = is < wanted ? columns / wanted : rows;
  // Pillow takes the box in single precision.
  const [left, top, right, bottom] = [
    (columns - wide) / 2, (rows - high) / 2,
    (columns - wide) / 2 + wide, (rows - high) / 2 + high,
  ].map(Math.fround);
  if (left || right !== coverWidth || columns !== coverWidth) {
    const made = weights(columns, left, right, coverWidth);
    bytes = scaled(bytes, rows, columns, channels, made);
  }
  if (top || bottom !== coverHeight || rows !== coverHeight) {
    const made = weights(rows, top, bottom, coverHeight);
    bytes = scaled(bytes, 1, rows, coverWidth * channels, made);
  }
  return bytes;
}

function centre(bytes, [coverHeight, coverWidth]) {
  const top = Math.floor((coverHeight - height) / 2);
  const left = Math.floor((coverWidth - width) / 2);
  const out = new Uint8Array(height * width * channels);
  for (let y = 0; y < height; y++) {
    const from = ((top + y) * coverWidth + left) * channels;
    out.set(bytes.subarray(from, from + width * channels), y * width * channels);
  }
  return out;
}

function draw(bitmap, side) {
  const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement('canvas');
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.fillStyle = '#fff';
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = 'high';
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// What the model gets of an image: bytes [height, width, channels].
function pixels(bitmap) {
  const canvas = draw(bitmap, LARGEST);
  const [columns, rows] = [canvas.width, canvas.height];
  const rgba = canvas.getContext('2d').getImageData(0, 0, columns, rows).data;
  const bytes = new Uint8ClampedArray(rows * columns * channels);
  for (let i = 0, to = 0; i < rgba.length; i += 4) {
    if (channels === 1) {
      bytes[to++] = (19595 * rgba[i] + 38470 * rgba[i + 1]
        + 7471 * rgba[i + 2] + 32768) >> 16;
    } else {
      for (let c = 0; c < 3; c++) bytes[to++] = rgba[i + c];
    }
  }
  const cover = about.resize.cover;
  return centre(fit(bytes, rows, columns, cover), cover);
}

const decode = file => createImageBitmap(
  file, {colorSpaceConversion: 'none', imageOrientation: 'from-image'});

function add(parent, name, content = '', kind = '') {
  const element = document.createElement(name);
  element.textContent = content;
  if (kind) element.className = kind;
  return parent.appendChild(element);
}

const percent = p => p >= .9995 ? '100%' : p < .001 ? '< 0.1%'
  : `${(100 * p).toFixed(1)}%`;

function seen(bytes) {
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [width, height];
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) {
      image.data[4 * i + c] = bytes[i * channels + (channels === 1 ? 0 : c)];
    }
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  canvas.className = 'tiny';
  return canvas;
}

async function classify(file) {
  const card = document.createElement('article');
  const picture = add(card, 'div', '', 'picture');
  const answer = add(card, 'div', '', 'answer');
  try {
    const bitmap = await decode(file);
    const preview = picture.appendChild(draw(bitmap, 640));
    if (Math.max(bitmap.width, bitmap.height) <= 64) preview.className = 'tiny';
    const bytes = pixels(bitmap);
    bitmap.close();
    const figure = add(picture, 'figure');
    figure.append(seen(bytes));
    add(figure, 'figcaption', `What the model sees: ${width} × ${height} pixels`);
    const found = [...await (await model)(bytes)];
    const order = found.map((_, i) => i).sort((a, b) => found[b] - found[a]);
    add(answer, 'h2', about.class_names[order[0]]);
    add(answer, 'p', file.name, 'file');
    const list = add(answer, 'ol');
    for (const i of order.slice(0, SHOWN)) {
      const row = add(list, 'li');
      add(row, 'span', about.class_names[i]);
      add(row, 'b', percent(found[i]));
      add(row, 'i').style.setProperty('--share', `${100 * found[i]}%`);
    }
  } catch (error) {
    add(answer, 'h2', 'Not readable as an image', 'bad');
    add(answer, 'p', `${file.name}: this browser cannot decode it.`, 'file');
  }
  $('results').prepend(card);
}

async function take(files) {
  for (const file of files) await classify(file);
}

const error = about.run.error_percent;
const known = ['test', 'validation'].find(name => name in error);
const classes = about.class_names;
$('about').textContent = [
  `Knows ${classes.length} classes`,
  known && `${known} error ${error[known].toFixed(1)}%`,
  `${about.run.method}, ${about.run.model}`,
].filter(Boolean).join(' · ');
$('classes').textContent = `Classes: ${classes.slice(0, 20).join(', ')}`
  + (classes.length > 20 ? ` and ${classes.length - 20} more.` : '.');

const model = load();
model.then(
  () => $('status').textContent = 'or paste one; it works offline',
  failure => {
    $('status').textContent = `The model cannot be loaded: ${failure.message}`;
    $('status').className = 'bad';
  });
$('files').addEventListener('change', event => {
  const files = [...event.target.files];
  event.target.value = '';  // So that the same file can be chosen again.
  take(files);
});
let inside = 0;
const over = change => {
  inside = Math.max(0, inside + change);
  document.body.classList.toggle('over', inside > 0);
};
addEventListener('dragenter', () => over(1));
addEventListener('dragleave', () => over(-1));
addEventListener('dragover', event => event.preventDefault());
addEventListener('drop', event => {
  event.preventDefault();
  over(-inside);
  take([...event.dataTransfer.files]);
});
addEventListener('paste', event => take([...event.clipboardData.files]));
