"use strict";
// Numbers as text and as places on an axis.

// 12345 -> "12.3k", 0.000123 -> "1.23e-4"; at most four digits that count.
function short_number(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size < 1e4) return String(Number(value.toPrecision(4)));
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return Number((value / unit).toPrecision(3)) + suffix;
  }
  return String(value);
}

function bytes_text(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) { bytes /= 1024; ++unit; }
  return `${bytes.toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

function seconds_text(seconds) {
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`;
}

// 1, 2 or 5 times a power of ten that cuts [low, high] into about `parts`.
function tick_step(low, high, parts) {
  const raw = (high - low) / parts, power = 10 ** Math.floor(Math.log10(raw)), lead = raw / power;
  return power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
}

function linear_ticks(low, high, parts) {
  const step = tick_step(low, high, parts), first = Math.ceil(low / step - 1e-9);
  // By their number: far from zero a step may be too small for the next tick to be another number.
  const count = Math.min(Math.floor((high - first * step) / step + 1e-9) + 1, 4 * parts);
  return Array.from({length: Math.max(count, 0)}, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Powers of ten; where there are fewer than three, two and five times them as well.
function log_ticks(low, high) {
  const of = (leads) => {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e) {
      for (const lead of leads) {
        const tick = Number(`${lead}e${e}`);
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  };
  const powers = of([1]);
  if (powers.length > 8) return powers.filter((_, i) => i % Math.ceil(powers.length / 8) === 0);
  if (powers.length >= 3) return powers;
  const more = of([1, 2, 5]);
  return more.length >= 2 ? more : linear_ticks(low, high, 4);
}

// From [low, high] to [from, to]; with log by the logarithm. An empty range is widened, and one that
// is nothing but rounding.
function make_scale(low, high, from, to, log) {
  if (!(high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) {
    const middle = Number.isFinite(low) ? low : 1, pad = Math.abs(middle) * 0.05 || 0.5;
    low = log ? middle / 1.5 : middle - pad;
    high = log ? middle * 1.5 : middle + pad;
  }
  const f = log ? Math.log10 : (x) => x, a = f(low), b = f(high);
  const scale = (x) => from + (f(x) - a) / (b - a) * (to - from);
  scale.ticks = (parts) => (log ? log_ticks(low, high) : linear_ticks(low, high, parts));
  scale.invert = (y) => {
    const x = a + (y - from) / (to - from) * (b - a);
    return log ? 10 ** x : x;
  };
  return scale;
}

// Exponential moving average with weight `keep` on the past, unbiased at the start.
function smoothed(points, keep) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = keep * sum + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    return [x, sum / weight];
  });
}
