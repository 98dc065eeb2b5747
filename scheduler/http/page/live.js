// Asks /live about once a second while somebody looks, and shows what it says.

import { Bars, LinkChart, quantile } from "./charts.js";
import { HeatMap } from "./heat_map.js";
import { History, PHASES, SPAN_S } from "./history.js";
import { bytes, count, digits, percent, seconds } from "./numbers.js";
import { showRequests } from "./request_table.js";

const EVERY_MS = 1000;
const DEADLINE_MS = 10_000;
const OLD_S = 3; // from when on it is said how old something is
const KEY = "slotstream-key"; // in the tab's own storage
const REFUSED = "The server does not take this key.";

const $ = (id) => document.getElementById(id);
const past = new History();
const maps = new Map();
const link = new LinkChart($("link-chart"), PHASES, SPAN_S);
const ttft = new Bars($("ttft-chart"));
let last = null; // what /live said last
let timer = 0;

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Asking -------------------------------------------------------------------------------------------------------------

function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

async function look() {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  try {
    const options = { headers, cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) };
    const response = await fetch("live", options);
    if (response.status === 401) return askForKey();
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    show(await response.json());
  } catch (error) {
    showUnreachable(error);
  }
  lookSoon();
}

function lookSoon() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

function askForKey() {
  const refused = key() !== "";
  sessionStorage.removeItem(KEY);
  showState("bad", "locked");
  say(refused ? REFUSED : "");
  $("figures").hidden = $("loading").hidden = true;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = $("key").value.trim();
  $("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(typed)) return say(REFUSED); // no header may hold it, so that no server takes it
  sessionStorage.setItem(KEY, typed);
  $("key-form").hidden = true;
  say("");
  look();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && $("key-form").hidden) look();
});

// Showing ------------------------------------------------------------------------------------------------------------

function show(seen) {
  last = seen;
  document.title = seen.model ? `${seen.model} · slotstream` : "slotstream";
  setText("model", seen.model);
  showPhase(seen);
  showLoading(seen);
  if (seen.stats?.workers.length) $("figures").hidden = false;
  $("figures").classList.toggle("stale", !seen.stats?.workers.length);
  if (seen.stats?.workers.length) showFigures(seen);
  else past.interrupt(seen.at_s);
}

const STATES = { ready: "good", dead: "bad", away: "bad" };
const SAID = {
  restarting: "A part of the engine died and is started anew; the figures go on when it is back.",
  draining: "The engine finishes what runs and takes nothing new.",
  dead: "The engine is dead.",
  away: "The engine does not answer; it may be starting anew. This page goes on asking.",
};

function showPhase({ phase, detail, stats }) {
  showState(STATES[phase] ?? "wait", phase);
  const down = stats?.workers.filter(({ alive }) => !alive).map(({ name }) => name) ?? [];
  const beside = phase === "ready" && down.length ? `${down.join(", ")} down; the others serve on.` : "";
  say([SAID[phase], beside, detail].filter(Boolean).join(" "));
}

function showState(kind, text) {
  setText("state", text);
  $("state").dataset.kind = kind;
}

function say(text) {
  setText("notice", text);
  $("notice").hidden = !text;
}

function showUnreachable(error) {
  const why = error.name === "TimeoutError" ? "it took too long" : error.message;
  showState("bad", "unreachable");
  say(`The server cannot be reached (${why}). This page goes on asking.`);
  $("figures").classList.add("stale");
  if (last) past.interrupt(last.at_s);
}

function showLoading({ loading, done_nbytes, total_nbytes }) {
  $("loading").hidden = !loading;
  if (!loading) return;
  setText("loading-title", `Loading: ${loading}`);
  if (total_nbytes) {
    $("loading-bar").max = total_nbytes;
    $("loading-bar").value = done_nbytes;
  } else $("loading-bar").removeAttribute("value");
  const share = percent(done_nbytes, total_nbytes);
  setText("loading-text", total_nbytes ? `${share}, ${bytes(done_nbytes)} of ${bytes(total_nbytes)}` : "");
}

function showFigures(seen) {
  past.add(seen.at_s, seen.stats);
  showTiles(seen.stats);
  if (seen.activity) showActivity(seen);
  showTtft(seen.ttft);
  showLink(seen.at_s);
}

function showActivity(seen) {
  const { requests } = seen.activity;
  showMaps(seen);
  showRequests($("request-rows"), requests);
  const { left_out } = seen.activity;
  setText("requests-more", left_out ? `and ${count(left_out)} more` : "None at the moment.");
  $("requests-more").hidden = requests.length > 0 && !left_out;
}

function sum(workers, name) {
  return workers.reduce((total, worker) => total + worker[name], 0);
}

function showTiles(stats) {
  const { workers } = stats;
  setText("rate", digits(past.rate((one) => one.generated_tokens)));
  setText("rate-more", `${count(stats.generated_tokens)} in all`);
  setText("running", count(stats.running));
  setText("running-more", `${count(stats.waiting)} wait, ${count(stats.finished)} done`);
  showHits("hits", stats, "decode");
  showHits("demand-hits", stats, "demand");
  setText("prefix", percent(stats.cached_tokens, stats.queried_tokens));
  setText("prefix-more", `${count(stats.cached_tokens)} tokens`);
  const used = stats.kv_pages_total - stats.kv_pages_available;
  setText("kv", percent(used, stats.kv_pages_total));
  setText("kv-more", `${count(used)} of ${count(stats.kv_pages_total)} pages`);
  setText("slots", count(sum(workers, "resident_slots")));
  setText("slots-more", `of ${count(stats.slots)}`);
  setText("restarts", count(stats.restarts));
  setText("restarts-more", `${count(stats.failed)} failed, ${count(stats.refused)} refused`);
}

/** The hit rate of the last half minute, and below it the one since the start. */
function showHits(id, stats, phase) {
  const looked = past.growth((one) => one[phase].lookups);
  const recent = percent(past.growth((one) => one[phase].hits), looked);
  const all = percent(stats[phase].hits, stats[phase].lookups);
  setText(id, looked ? recent : all);
  setText(`${id}-more`, looked ? `${all} in all` : "in all");
}

function showMaps({ activity, stats }) {
  const shown = activity.residency.filter((one) => one.layers && one.experts);
  $("residency-none").hidden = shown.length > 0;
  for (const name of maps.keys()) {
    if (!shown.some((one) => one.name === name)) removeMap(name);
  }
  for (const one of shown) {
    if (!maps.has(one.name)) maps.set(one.name, new HeatMap($("heat-maps"), one.name));
    const worker = stats.workers.find(({ name }) => name === one.name);
    maps.get(one.name).show(one, slotsText(worker, one.age_s), performance.now());
  }
}

function removeMap(name) {
  maps.get(name).root.remove();
  maps.delete(name);
}

/** What its counters say of its slots; what is shown is old where the worker is busy with a long step. */
function slotsText(worker, age_s) {
  const held = worker ? `${count(worker.resident_slots)} of ${count(worker.slots)} slots hold an expert` : "";
  return age_s > OLD_S ? `${held}, shown as of ${seconds(age_s)} ago` : held;
}

function showTtft({ bounds, counts }) {
  ttft.draw(bounds, counts);
  const total = counts.reduce((all, many) => all + many, 0);
  const parts = [`${count(total)} requests by HTTP`];
  if (total) parts.push(`median ${quantile(bounds, counts, 0.5)}`, `95 % ${quantile(bounds, counts, 0.95)}`);
  setText("ttft-text", parts.join(", "));
  $("ttft-chart").setAttribute("aria-label", `Histogram of the time to the first token: ${parts.join(", ")}`);
}

function showLink(now) {
  link.draw(past.samples, now);
  const rates = past.samples.at(-1)?.rates ?? Object.fromEntries(PHASES.map((phase) => [phase, 0]));
  const texts = PHASES.map((phase) => `${bytes(rates[phase])}/s`);
  $("link-legend").replaceChildren(...PHASES.map((phase, i) => legendEntry(phase, texts[i])));
  const said = PHASES.map((phase, i) => `${phase} ${texts[i]}`).join(", ");
  $("link-chart").setAttribute("aria-label", `Bytes copied to the device over the last ${SPAN_S} seconds; now ${said}`);
}

function legendEntry(phase, text) {
  const entry = document.createElement("span");
  const swatch = entry.appendChild(document.createElement("i"));
  swatch.className = `swatch ${phase}`;
  const value = document.createElement("b");
  value.textContent = text;
  entry.append(`${phase} `, value);
  return entry;
}

function redraw() {
  if (!last?.stats?.workers.length) return;
  for (const map of maps.values()) map.draw(performance.now());
  showTtft(last.ttft);
  showLink(last.at_s);
}

new ResizeObserver(redraw).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
look();
