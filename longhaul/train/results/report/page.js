// The page: reads the runs, lays out the sections and keeps them in step with the controls.

const kRunColors = 8, kDashes = ["", "6 3", "2 3", "8 3 2 3"];

const runs = JSON.parse(document.getElementById("runs").textContent);
const page = document.getElementById("page");
const charts = [], redraws = [];
const settings = {smoothing: 0, log: false};

const run_color = (i) => `var(--run-${i % kRunColors})`;
const run_dash = (i) => kDashes[Math.floor(i / kRunColors) % kDashes.length];
const layer_color = (i, count) => `hsl(${Math.round(265 - 235 * (count > 1 ? i / (count - 1) : 0))} 65% var(--layer-lightness))`;

function section(title, note) {
  page.append(html("h2", {}, title));
  if (note) page.append(html("p", {class: "soft"}, note));
}

function table(header, rows) {
  const cell = (kind, text, i) => html(kind, i > 0 ? {class: "number"} : {}, text instanceof Node ? text : String(text ?? "-"));
  const head = html("tr", {}, ...header.map((text, i) => cell("th", text, i)));
  const body = rows.map((row) => html("tr", {}, ...row.map((text, i) => cell("td", text, i))));
  return html("div", {class: "scroll"}, html("table", {}, html("thead", {}, head), html("tbody", {}, ...body)));
}

function run_label(run, i) {
  return html("span", {}, html("span", {class: "chip", style: `background:${run_color(i)}`}), run.name);
}

function grid() {
  const place = html("div", {class: "charts"});
  page.append(place);
  return place;
}

function add_chart(place, series, options) {
  const chart = new LineChart(series, options);
  if (chart.series.length === 0) return;
  charts.push(chart);
  place.append(chart.figure);
}

// A figure of all runs; `constant_zero_is_off` leaves out a loss that nobody switched on.
function add_figure(place, figure, options, others = []) {
  const several = runs.length > 1;
  const series = runs.flatMap((run, i) => [
    {name: several ? run.name : options.curve || options.title, color: run_color(i), dash: run_dash(i), curve: run.figures[figure]},
    ...others.map(({figure: other, name, color}) => ({name: several ? `${run.name}, ${name}` : name, dots: true, dash: several ? "3 3" : "",
      color: several ? run_color(i) : color, curve: run.figures[other]})),
  ]);
  if (options.off_at_zero && series.every((one) => !one.curve || one.curve.points.every(([, y]) => y === 0))) return;
  add_chart(place, series, options);
}

// One curve a layer; of several runs each has its own dashes.
function add_by_layer(place, what, options) {
  const layers = Object.keys(runs.reduce((all, run) => ({...all, ...run.by_layer[what]}), {})).sort((a, b) => a - b);
  const series = runs.flatMap((run, i) => layers.map((layer, k) => ({
    name: (runs.length > 1 ? `${run.name}, ` : "") + `layer ${layer}`, color: layer_color(k, layers.length),
    dash: kDashes[i % kDashes.length], curve: run.by_layer[what][layer]})));
  add_chart(place, series, {...options, wide: true});
}

function header() {
  document.title = `Training report: ${runs.map((run) => run.name).join(", ")}`;
  page.append(html("h1", {}, "Training report"));
  page.append(table(["run", "steps", "tokens", "lm loss", "validation", "tokens/s", "MFU", "peak memory", "skipped"], runs.map((run, i) => {
    const number = (value, text = short_number) => (value === undefined ? "-" : typeof value === "string" ? value : text(value));
    return [run_label(run, i), run.steps.toLocaleString("en"), run.tokens.toLocaleString("en"), number(run.figures.lm_loss?.last),
            number(run.figures.validation_loss?.last), number(run.figures.tokens_per_second?.median),
            number(run.figures.mfu?.median, (share) => `${(100 * share).toFixed(1)}%`), number(run.memory.peak?.last, bytes_text),
            run.skipped.length];
  })));
  page.append(html("p", {class: "soft"}, "Losses are those of the last step; tokens/s and MFU the medians."));
}

function controls() {
  const smoothing = html("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing"});
  const value = html("output", {}, "0");
  const log = html("input", {type: "checkbox", id: "log"});
  smoothing.addEventListener("input", () => {
    settings.smoothing = Number(smoothing.value);
    value.textContent = smoothing.value;
    draw();
  });
  log.addEventListener("change", () => { settings.log = log.checked; draw(); });
  page.append(html("div", {class: "controls"}, html("label", {}, "smoothing", smoothing, value), html("label", {}, log, "log scale")));
}

function curves() {
  section("Losses");
  let place = grid();
  const percent = (share) => `${short_number(100 * share)}%`;
  add_figure(place, "lm_loss", {title: "Language model loss", note: "nats a token", wide: true, curve: "training"},
             [{figure: "validation_loss", name: "validation", color: "var(--run-1)"}]);
  add_figure(place, "loss", {title: "Objective", note: "all losses with their weights"});
  add_figure(place, "mtp_loss", {title: "Multi-token prediction", note: "mean over its modules", off_at_zero: true});
  add_figure(place, "balance_loss", {title: "Balance loss", note: "weighted, all layers", off_at_zero: true});
  add_figure(place, "z_loss", {title: "Router z-loss", note: "weighted, all layers", off_at_zero: true});
  add_figure(place, "validation_bits_per_byte", {title: "Validation, bits per byte"});
  section("Indexer");
  place = grid();
  add_by_layer(place, "indexer_loss", {title: "Indexer loss by layer", note: "KL divergence from the attention's distribution"});
  add_by_layer(place, "indexer_recall", {title: "Indexer recall by layer", text: percent, log: false,
                                         note: "share of dense attention's mass that the selected keys hold"});
  if (place.children.length === 0) place.append(html("p", {class: "soft"}, "No indexer learned in these runs."));
  section("Optimization and speed");
  place = grid();
  add_figure(place, "grad_norm", {title: "Gradient norm", note: "before clipping"});
  add_figure(place, "lr", {title: "Learning rate"});
  add_figure(place, "tokens_per_second", {title: "Throughput", note: "tokens a second, all ranks", log: false});
  add_figure(place, "mfu", {title: "MFU", note: "share of the machine's measured rate of matrix products", text: percent, log: false});
  add_figure(place, "comm_wait_share", {title: "Waiting for other ranks", note: "share of the step", text: percent, log: false, off_at_zero: true});
}

function expert_load() {
  const with_load = runs.filter((run) => run.expert_load);
  if (with_load.length === 0) return;
  section("Expert load", "Tokens that chose an expert, over the mean of its layer.");
  const place = grid();
  place.append(html("div", {class: "scale wide"}, "0%", html("i"), "200% and more"));
  for (const run of with_load) {
    const {nodes, redraw} = load_section(run.expert_load, run.name);
    place.append(...nodes);
    redraws.push(redraw);
  }
}

// A bar of parts for each run, and the same in figures.
function bars(title, note, kinds, parts_of, text) {
  const rows = runs.map((run) => ({run, parts: parts_of(run)})).filter(({parts}) => parts.some((part) => part > 0));
  if (rows.length === 0) return;
  section(title, note);
  const longest = Math.max(...rows.map(({parts}) => parts.reduce((a, b) => a + b, 0)));
  for (const {run, parts} of rows) {
    if (runs.length > 1) page.append(html("div", {}, run.name));
    page.append(html("div", {class: "bar"}, ...parts.map((part, k) =>
      html("span", {style: `width:${100 * part / longest}%;background:${run_color(k)}`, title: `${kinds[k]} ${text(part)}`}))));
  }
  const label = (kind, k) => html("span", {}, html("span", {class: "chip", style: `background:${run_color(k)}`}), kind);
  page.append(table(["", ...rows.map(({run}) => run.name)], kinds.map((kind, k) =>
    [label(kind, k), ...rows.map(({parts}) => text(parts[k]))])));
}

function memory_and_time() {
  const kinds = ["weights", "gradients", "optimizer", "activations"];
  bars("Memory", "Bytes of one rank. Activations: the most that tensors held at once beyond the other three.",
       kinds, (run) => kinds.map((kind) => Number(run.memory[kind]?.last) || 0), bytes_text);
  const parts = ["data", "forward", "backward", "optimizer", "other", "validation", "checkpoint"];
  // Validation and checkpoints do not come with each step: their share of one.
  const per_step = (run, part) => {
    const curve = run.seconds[part];
    if (!curve) return 0;
    const rare = part === "validation" || part === "checkpoint";
    return curve.mean * (rare ? curve.count / run.lines : 1);
  };
  bars("Time of a step", "Means over the steps that were measured; validation and checkpoints spread over all steps. " +
       "Waiting for other ranks may lie in any part: counts of tokens are summed in data, gradients in " +
       "backward, their norm in optimizer.", parts, (run) => parts.map((part) => per_step(run, part)), seconds_text);
}

// {"section.key": value} of a resolved job.
function settings_of(toml) {
  const found = {};
  let prefix = "";
  for (const line of toml.split("\n")) {
    const header = line.match(/^\[(.*)\]$/), pair = line.match(/^([\w.]+) = (.*)$/);
    if (header) prefix = header[1] + ".";
    if (pair) found[prefix + pair[1]] = pair[2];
  }
  return found;
}

function configuration() {
  section("Configuration");
  if (runs.length > 1) {
    const all = runs.map((run) => settings_of(run.job));
    const keys = [...new Set(all.flatMap((one) => Object.keys(one)))].filter((key) => new Set(all.map((one) => one[key])).size > 1);
    page.append(keys.length === 0 ? html("p", {}, "All runs have the same settings.")
                : table(["setting", ...runs.map((run) => run.name)], keys.map((key) => [key, ...all.map((one) => one[key])])));
  }
  for (const run of runs) {
    page.append(html("details", {}, html("summary", {}, `job.toml of ${run.name}`), html("pre", {}, run.job || "not there")));
  }
}

// The starts of a run that changed what it ran on: [{name, facts}].
function environments_of(run) {
  const found = [];
  for (const {first_step, time, ...facts} of run.starts) {
    if (JSON.stringify(found.at(-1)?.facts) === JSON.stringify(facts)) continue;
    found.push({name: found.length === 0 ? run.name : `${run.name}, from step ${first_step}`, facts});
  }
  return found;
}

function environment() {
  const all = runs.flatMap(environments_of), keys = [...new Set(all.flatMap(({facts}) => Object.keys(facts)))];
  if (keys.length === 0) return;
  section("Environment");
  const text = (key, value) => (value === undefined ? value : key.endsWith("_bytes") ? bytes_text(value)
                                : Array.isArray(value) ? value.join(", ") : value);
  page.append(table(["", ...all.map(({name}) => name)], keys.map((key) =>
    [key.replace("_bytes", "").replaceAll("_", " "), ...all.map(({facts}) => text(key, facts[key]))])));
}

function draw() {
  for (const chart of charts) chart.draw(settings);
  for (const redraw of redraws) redraw();
}

header();
controls();
curves();
expert_load();
memory_and_time();
configuration();
environment();
draw();

let width = page.clientWidth;
addEventListener("resize", () => {
  if (page.clientWidth === width) return;
  width = page.clientWidth;
  draw();
});
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
