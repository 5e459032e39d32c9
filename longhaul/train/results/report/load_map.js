// The load of the experts, layer by expert: a cell is an expert's tokens over the mean of its layer.

function color_of(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function rgb_of(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// 0% is the low end, 100% the middle, 200% and more the high end.
function load_color(percent, colors) {
  const part = Math.min(percent, 200) / 100;
  const [a, b, t] = part < 1 ? [colors.low, colors.mean, part] : [colors.mean, colors.high, part - 1];
  return a.map((value, i) => Math.round(value + (b[i] - value) * t));
}

class LoadMap {
  constructor(load, title) {
    this.load = load;
    this.title = html("h3", {}, title);
    this.note = html("p", {class: "soft"});
    this.canvas = html("canvas", {width: load.experts, height: load.layers.length, role: "img",
                                  "aria-label": "load by layer and expert"});
    const height = Math.min(Math.max(load.layers.length * 18, 40), 420);
    this.canvas.style.height = `${height}px`;
    this.figure = html("figure", {class: "wide"}, this.title, this.note, this.canvas,
                       html("p", {class: "soft"}, `rows: layers ${load.layers[0]} to ${load.layers.at(-1)}, ` +
                            `columns: experts 0 to ${load.experts - 1}`));
    this.canvas.addEventListener("pointermove", (event) => this.point_at(event));
    this.canvas.addEventListener("pointerleave", () => this.show(this.frame));
  }

  show(frame) {
    this.frame = frame;
    const {step, percent} = this.load.frames[frame];
    const colors = {low: rgb_of(color_of("--map-low")), mean: rgb_of(color_of("--map-mean")), high: rgb_of(color_of("--map-high"))};
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.load.experts, this.load.layers.length);
    percent.forEach((value, i) => image.data.set([...load_color(value, colors), 255], 4 * i));
    context.putImageData(image, 0, 0);
    const most = Math.max(...percent), idle = percent.filter((value) => value === 0).length;
    this.note.textContent = `step ${step.toLocaleString("en")}: the busiest expert has ${most}% of the mean, ` +
      `${idle} of ${percent.length} had no token`;
  }

  point_at(event) {
    const box = this.canvas.getBoundingClientRect(), {layers, experts, frames} = this.load;
    const place = (offset, size, count) => Math.min(Math.max(Math.floor(offset / size * count), 0), count - 1);
    const expert = place(event.clientX - box.left, box.width, experts);
    const row = place(event.clientY - box.top, box.height, layers.length);
    this.note.textContent = `step ${frames[this.frame].step.toLocaleString("en")}: layer ${layers[row]}, expert ${expert}: ` +
      `${frames[this.frame].percent[row * experts + expert]}% of the mean`;
  }
}

// A run's map with a slider over its steps; on paper the first and the middle one stand before it.
function load_section(load, name) {
  const last = load.frames.length - 1;
  const map = new LoadMap(load, name);
  const slider = html("input", {type: "range", min: 0, max: last, value: last, "aria-label": "step"});
  slider.addEventListener("input", () => map.show(Number(slider.value)));
  const earlier = [...new Set([0, last >> 1])].filter((frame) => frame !== last).map((frame) => {
    const one = new LoadMap(load, name);
    one.figure.classList.add("print-only");
    return {one, frame};
  });
  const control = html("label", {class: "screen-only"}, "step ", slider);
  const redraw = () => {
    map.show(Number(slider.value));
    for (const {one, frame} of earlier) one.show(frame);
  };
  map.figure.insertBefore(control, map.canvas);
  return {nodes: [...earlier.map(({one}) => one.figure), map.figure], redraw};
}
