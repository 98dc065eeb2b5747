// Which experts of which layer are in slots of one worker, and since when.

import { count, percent, seconds } from "./numbers.js";

const SETTLED_MS = 60_000; // resident for so long, a cell has its last colour
const MOST_CELL = 36; // pixels
const MAP_HEIGHT = 330; // pixels that all layers together are to take
const SMALL_MAP_HEIGHT = 160; // where there are more than two maps

/** The bits of a residency, row by row: [layers][experts] of 0 and 1. */
function bits({ layers, experts, resident }) {
  const packed = atob(resident);
  const row = Math.ceil(experts / 8);
  return Array.from({ length: layers }, (_, layer) =>
    Array.from({ length: experts }, (_, expert) => {
      const byte = packed.charCodeAt(layer * row + (expert >> 3));
      return (byte >> (expert & 7)) & 1;
    }),
  );
}

/** "#rrggbb" of a custom property of the page -> [r, g, b]. */
function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => Number.parseInt(value.slice(at, at + 2), 16));
}

function made(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

export class HeatMap {
  constructor(parent, name) {
    this.root = parent.appendChild(made("section", "worker"));
    const head = this.root.appendChild(made("div", "worker-head"));
    head.append(made("h3", "", name), (this.text = made("span", "figure")));
    const map = this.root.appendChild(made("div", "map"));
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.name = name;
    const experts = made("div", "experts");
    experts.append((this.firstExpert = made("span", "")), (this.lastExpert = made("span", "")));
    map.append(made("span", "first-layer", "layer 0"), this.canvas, (this.lastLayer = made("span", "last-layer")), experts);
    this.pointed = this.root.appendChild(made("p", "pointed"));
    this.addTable();
    this.cells = [];
    this.since = []; // [layers][experts]: when an expert was first seen in its slot, 0 if it is in none
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.pointed.textContent = ""));
  }

  addTable() {
    const details = this.root.appendChild(document.createElement("details"));
    details.append(made("summary", "", "Numbers by layer"));
    const table = details.appendChild(made("table", "layers"));
    const head = table.createTHead().insertRow();
    for (const text of ["Layer", "Resident", "Share"]) {
      const cell = head.appendChild(made("th", text === "Layer" ? "" : "number", text));
      cell.scope = "col";
    }
    this.rows = table.createTBody();
    this.details = details;
    details.addEventListener("toggle", () => this.fillTable());
  }

  /** `residency`: {layers, experts, resident}; `slots`: what the worker's counters say of them. */
  show(residency, slots, now) {
    const { layers, experts } = residency;
    if (this.since.length !== layers || this.since[0]?.length !== experts) {
      this.since = Array.from({ length: layers }, () => new Array(experts).fill(0));
    }
    this.cells = bits(residency);
    this.cells.forEach((row, layer) => row.forEach((bit, i) => this.mark(layer, i, bit, now)));
    this.text.textContent = slots;
    this.lastLayer.textContent = `${layers - 1}`;
    this.firstExpert.textContent = "expert 0";
    this.lastExpert.textContent = `${experts - 1}`;
    const resident = this.cells.flat().reduce((sum, bit) => sum + bit, 0);
    const label = `${this.name}: ${count(resident)} of ${count(layers * experts)} experts resident, by layer and expert`;
    this.canvas.setAttribute("aria-label", label);
    this.draw(now);
    this.fillTable();
  }

  mark(layer, expert, bit, now) {
    if (!bit) this.since[layer][expert] = 0;
    else if (!this.since[layer][expert]) this.since[layer][expert] = now;
  }

  /** Cells with gaps where there is room for them; where there is not, neighbours share a pixel. */
  draw(now) {
    const layers = this.since.length;
    const experts = this.since[0]?.length ?? 0;
    const width = this.canvas.clientWidth;
    if (!experts || !width) return;
    const scale = window.devicePixelRatio || 1;
    const cell = Math.min(MOST_CELL, width / experts);
    const aim = this.root.parentElement.childElementCount > 2 ? SMALL_MAP_HEIGHT : MAP_HEIGHT;
    const height = Math.max(3, Math.min(MOST_CELL, Math.max(cell, aim / layers)));
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * layers * scale);
    this.canvas.style.height = `${height * layers}px`;
    const columns = this.canvas.width / experts;
    const rows = this.canvas.height / layers;
    const gap = columns >= 3 * scale && rows >= 3 * scale ? scale : 0;
    const context = this.canvas.getContext("2d");
    const colours = this.colours();
    if (!gap) {
      context.fillStyle = colours[0];
      context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    }
    for (let layer = 0; layer < layers; layer += 1) {
      for (let expert = 0; expert < experts; expert += 1) {
        const since = this.since[layer][expert];
        if (!since && !gap) continue; // what is resident is seen also where others share its pixel
        context.fillStyle = this.fill(since, now, colours);
        const left = Math.round(expert * columns);
        const top = Math.round(layer * rows);
        const right = Math.round((expert + 1) * columns);
        const bottom = Math.round((layer + 1) * rows);
        context.fillRect(left, top, Math.max(1, right - left - gap), bottom - top - gap);
      }
    }
  }

  colours() {
    const [absent, fresh, settled] = ["--absent", "--fresh", "--settled"].map(colour);
    const ramp = Array.from({ length: 17 }, (_, i) =>
      fresh.map((from, part) => Math.round(from + ((settled[part] - from) * i) / 16)),
    );
    return [absent, ...ramp].map((rgb) => `rgb(${rgb})`);
  }

  fill(since, now, colours) {
    if (!since) return colours[0];
    return colours[1 + Math.round(16 * Math.min(1, (now - since) / SETTLED_MS))];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor(((event.clientY - box.top) / box.height) * this.since.length);
    const row = this.since[layer];
    const expert = Math.floor(((event.clientX - box.left) / box.width) * (row?.length ?? 0));
    const since = row?.[expert];
    if (since === undefined) return;
    const how = since ? `resident for ${seconds((performance.now() - since) / 1000)} or longer` : "not resident";
    this.pointed.textContent = `layer ${layer}, expert ${expert}: ${how}`;
  }

  fillTable() {
    if (!this.details.open) return;
    const lines = this.cells.map((row, layer) => {
      const resident = row.reduce((sum, bit) => sum + bit, 0);
      const line = document.createElement("tr");
      const texts = [`${count(resident)} of ${count(row.length)}`, percent(resident, row.length)];
      line.append(made("th", "", `${layer}`), ...texts.map((text) => made("td", "number", text)));
      line.firstChild.scope = "row";
      return line;
    });
    this.rows.replaceChildren(...lines);
  }
}
