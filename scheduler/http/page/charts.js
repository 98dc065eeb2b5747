// Two charts in SVG: areas on top of each other over time, and the bars of a histogram. Colours are the style sheet's.

import { bound, byteUnit, count, short } from "./numbers.js";

const HEIGHT = 180;
const LEFT = 62; // of the plot, where the labels of its values stand
const TOP = 8;
const BOTTOM = HEIGHT - 22;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A round number, with a round half, that is not below `value` and not far above. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((nice) => nice >= value * (1 - 1e-9));
}

/** Lines across at 0, the half and all of `top`, each with its label. */
function valueAxis(width, top, label) {
  return [0, 0.5, 1].flatMap((share) => {
    const y = BOTTOM - share * (BOTTOM - TOP);
    return [
      element("line", { class: share ? "grid" : "axis", x1: LEFT, x2: width, y1: y, y2: y }),
      element("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, label(share * top)),
    ];
  });
}

/** Bytes per second by phase over the last `span` seconds. */
export class LinkChart {
  constructor(svg, phases, span) {
    this.svg = svg;
    this.phases = phases;
    this.span = span;
  }

  /** `samples`: [{at, rates: {phase: bytes/s} or null where nothing is known}], oldest first; `now` as their `at`. */
  draw(samples, now) {
    const width = this.svg.clientWidth;
    const most = Math.max(1000, ...samples.map((one) => this.total(one)));
    const [size, unit] = byteUnit(most);
    const top = niceCeiling(most / size) * size;
    const x = (at) => LEFT + (width - LEFT) * Math.max(0, 1 - (now - at) / this.span);
    const y = (rate) => BOTTOM - (rate / top) * (BOTTOM - TOP);
    const areas = runs(samples.filter((one) => now - one.at <= this.span)).flatMap((run) => this.areas(run, x, y));
    const label = (rate) => (rate ? `${short(rate / size)} ${unit}/s` : "0");
    this.svg.replaceChildren(...valueAxis(width, top, label), ...areas, ...this.times(x, now));
  }

  total(sample) {
    return sample.rates ? this.phases.reduce((sum, phase) => sum + sample.rates[phase], 0) : 0;
  }

  areas(run, x, y) {
    const below = run.map(() => 0);
    return this.phases.map((phase) => {
      const lower = run.map((one, i) => `${x(one.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      run.forEach((one, i) => (below[i] += one.rates[phase]));
      const upper = run.map((one, i) => `${x(one.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      return element("polygon", { class: phase, points: [...upper, ...lower.reverse()].join(" ") });
    });
  }

  times(x, now) {
    return [1, 0.5, 0].map((share) => {
      const place = { 1: "start", 0: "end" }[share] ?? "middle";
      const text = share ? `${share * this.span} s ago` : "now";
      return element("text", { x: x(now - share * this.span), y: HEIGHT - 6, "text-anchor": place }, text);
    });
  }
}

/** `samples` cut where nothing is known. */
function runs(samples) {
  const cut = [[]];
  for (const one of samples) {
    if (one.rates) cut.at(-1).push(one);
    else cut.push([]);
  }
  return cut.filter((run) => run.length > 1);
}

/** How many fell between which bounds. */
export class Bars {
  constructor(svg) {
    this.svg = svg;
  }

  /** `counts[i]` lie above bounds[i - 1] and not above bounds[i]; the last ones above all bounds. */
  draw(bounds, counts) {
    const width = this.svg.clientWidth;
    const used = counts.flatMap((many, i) => (many ? [i] : []));
    const first = Math.max(0, Math.min(...used, counts.length - 8) - 1);
    const last = Math.min(counts.length - 1, Math.max(...used, first + 6) + 1);
    const most = Math.max(2, ...counts);
    const top = most > 10 ? niceCeiling(most) : 2 * Math.ceil(most / 2); // half of it is a count, too
    const step = (width - LEFT) / (last - first + 1);
    const bars = counts.slice(first, last + 1).map((many, i) => {
      const height = (many / top) * (BOTTOM - TOP);
      const place = { x: LEFT + i * step + 1, y: BOTTOM - height, width: Math.max(1, step - 2), height };
      const bar = element("rect", { class: "bar", ...place });
      bar.append(element("title", {}, `${span(bounds, first + i)}: ${count(many)}`));
      return bar;
    });
    const every = Math.ceil(52 / step);
    const labels = bounds.slice(first, last).flatMap((value, i) => {
      if (i % every) return [];
      return element("text", { x: LEFT + (i + 1) * step, y: HEIGHT - 6, "text-anchor": "middle" }, bound(value));
    });
    this.svg.replaceChildren(...valueAxis(width, top, short), ...bars, ...labels);
  }
}

function span(bounds, i) {
  if (i === bounds.length) return `over ${bound(bounds.at(-1))}`;
  return `${i ? bound(bounds[i - 1]) : "0"} to ${bound(bounds[i])}`;
}

/** The bound below which the share `share` of all lies, as a histogram can tell it: "200 ms"; "" of none. */
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, many) => sum + many, 0);
  let below = 0;
  const i = counts.findIndex((many) => (below += many) >= share * total);
  if (!total) return "";
  return i < bounds.length ? `≤ ${bound(bounds[i])}` : `> ${bound(bounds.at(-1))}`;
}
