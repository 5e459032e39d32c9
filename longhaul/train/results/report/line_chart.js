// A chart of curves over steps: smoothing, logarithmic scale, a legend that hides curves, and the
// values under the pointer.

function svg_element(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// The index of the last point at or before x, or 0.
function index_at(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (points[middle][0] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

function nearest_point(points, x) {
  const i = index_at(points, x), next = points[i + 1];
  return next && next[0] - x < x - points[i][0] ? next : points[i];
}

class LineChart {
  // series: [{name, color, dash, curve, dots}] with the curves of the data, which may be undefined;
  // options: {title, note, log, wide, text} where `text` turns a value into words and `log` forces the scale.
  constructor(series, options) {
    this.series = series.filter((one) => one.curve).map((one) => ({...one, shown: true}));
    this.options = options;
    this.text = options.text || short_number;
    this.figure = html("figure", options.wide ? {class: "wide"} : {}, html("h3", {}, options.title));
    if (options.note) this.figure.append(html("p", {class: "soft"}, options.note));
    this.place = html("div");
    this.figure.append(this.place);
    if (this.series.length > 1) this.figure.append(this.legend());
    this.width = 0;
  }

  legend() {
    const list = html("div", {class: "legend"});
    for (const one of this.series) {
      const mark = svg_element("svg", {viewBox: "0 0 22 8"});
      mark.append(svg_element("line", {x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 2.4, "stroke-dasharray": one.dash || "",
                                       style: `stroke:${one.color}`}));
      const button = html("button", {type: "button", "aria-pressed": "true"}, mark, one.name);
      button.addEventListener("click", () => {
        one.shown = !one.shown;
        button.setAttribute("aria-pressed", one.shown);
        this.draw(this.settings);
      });
      list.append(button);
    }
    return list;
  }

  // settings: {smoothing, log}
  draw(settings) {
    this.settings = settings;
    const log = this.options.log ?? settings.log;
    this.curves = this.series.filter((one) => one.shown).map((one) => {
      const drawable = (points) => (log ? points.filter(([, y]) => y > 0) : points);
      const raw = drawable(one.curve.points);
      // The points of a long run are its extremes, which would not average to it.
      return {...one, raw, smooth: one.dots || settings.smoothing === 0 ? raw
                                   : smoothed(drawable(one.curve.means || one.curve.points), settings.smoothing)};
    }).filter((one) => one.smooth.length > 0);
    const width = Math.max(this.place.clientWidth || this.width || 380, 200), height = this.options.wide ? 300 : 220;
    this.width = width;
    const svg = svg_element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.options.title});
    this.size = {left: 52, right: width - 10, top: 8, bottom: height - 22};
    if (this.curves.length === 0) {
      svg.append(svg_element("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, log ? "nothing above 0" : "nothing shown"));
    } else {
      this.axes(svg, log);
      this.lines(svg);
      this.listen(svg);
    }
    this.place.replaceChildren(svg);
  }

  axes(svg, log) {
    const {left, right, top, bottom} = this.size;
    const all = this.curves.flatMap((one) => one.smooth);
    const range = (k) => all.reduce(([low, high], p) => [Math.min(low, p[k]), Math.max(high, p[k])], [Infinity, -Infinity]);
    this.x = make_scale(...range(0), left, right, false);
    this.y = make_scale(...range(1), bottom - 4, top + 4, log);
    for (const tick of this.y.ticks(5)) {
      const y = this.y(tick);
      svg.append(svg_element("line", {x1: left, x2: right, y1: y, y2: y, class: "grid"}),
                 svg_element("text", {x: left - 6, y: y + 4, "text-anchor": "end"}, this.text(tick)));
    }
    svg.append(svg_element("text", {x: left - 6, y: bottom + 16, "text-anchor": "end"}, "step"));
    for (const tick of this.x.ticks(Math.max(2, Math.floor((right - left) / 90)))) {
      if (!Number.isInteger(tick)) continue;
      svg.append(svg_element("text", {x: this.x(tick), y: bottom + 16, "text-anchor": "middle"}, short_number(tick)));
    }
  }

  lines(svg) {
    // A raw point may lie outside of the range of the smooth curves.
    const id = `clip-${LineChart.next_id++}`, {left, right, top, bottom} = this.size;
    const clip = svg_element("clipPath", {id});
    clip.append(svg_element("rect", {x: left, y: top, width: right - left, height: bottom - top}));
    const group = svg_element("g", {"clip-path": `url(#${id})`});
    const path = (points, color, dash, kind) => svg_element("polyline", {
      class: kind, style: `stroke:${color}`, "stroke-dasharray": dash || "",
      points: points.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join(" ")});
    for (const one of this.curves) {
      if (one.smooth !== one.raw) group.append(path(one.raw, one.color, "", "curve raw"));
      group.append(path(one.smooth, one.color, one.dash, "curve"));
      if (!one.dots && one.raw.length > 1) continue;
      for (const [x, y] of one.raw) group.append(svg_element("circle", {cx: this.x(x), cy: this.y(y), r: 2.6, style: `fill:${one.color}`}));
    }
    svg.append(clip, group);
  }

  listen(svg) {
    const cross = svg_element("line", {class: "cross", y1: this.size.top, y2: this.size.bottom, visibility: "hidden"});
    svg.append(cross);
    const hide = () => { cross.setAttribute("visibility", "hidden"); this.tip?.remove(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), ratio = this.width / box.width;
      this.show((event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio, cross);
    });
    svg.addEventListener("pointerleave", hide);
  }

  // The values at the step under the pointer; of many curves those nearest to it.
  show(px, py, cross) {
    const kMost = 10;
    const step = this.x.invert(Math.min(Math.max(px, this.size.left), this.size.right));
    const found = this.curves.map((one) => ({one, point: nearest_point(one.smooth, step)}))
      .sort((a, b) => Math.abs(this.y(a.point[1]) - py) - Math.abs(this.y(b.point[1]) - py));
    const at = found[0].point[0], x = this.x(at);
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    this.tip?.remove();
    this.tip = html("div", {class: "tip"}, html("b", {}, `step ${at.toLocaleString("en")}`));
    for (const {one, point} of found.slice(0, kMost).sort((a, b) => b.point[1] - a.point[1])) {
      this.tip.append(html("div", {}, html("span", {class: "chip", style: `background:${one.color}`}),
                           `${one.name} ${this.text(point[1])}` + (point[0] === at ? "" : ` (step ${point[0]})`)));
    }
    if (found.length > kMost) this.tip.append(html("div", {class: "soft"}, `and ${found.length - kMost} more`));
    this.figure.append(this.tip);
    const room = this.figure.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(x + 24, room))}px`;
    this.tip.style.top = `${this.place.offsetTop + 4}px`;
  }
}
LineChart.next_id = 0;
