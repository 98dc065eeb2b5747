// The requests that are being served. Their ids are their clients', so that all is set as text, never as markup.

import { count, seconds } from "./numbers.js";

const COLUMNS = ["id", "phase", "progress", "prompt", "new", "age", "worker"];
const CLASSES = { prompt: "number wide", new: "number wide", age: "number", worker: "wide" };
const WORDS = { waiting: "waits", prefill: "prefill", decode: "decode" };

function newRow() {
  const row = document.createElement("tr");
  for (const name of COLUMNS) {
    const cell = row.appendChild(document.createElement(name === "id" ? "th" : "td"));
    if (name === "id") cell.scope = "row";
    cell.className = CLASSES[name] ?? "";
  }
  const bar = document.createElement("progress");
  row.cells[2].append(bar, document.createElement("span"));
  return row;
}

/** Sets the text only where it changes, so that a selection survives. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(row, request) {
  const [id, phase, progress, prompt, made, age, worker] = row.cells;
  const name = request.index ? `${request.request_id} #${request.index}` : request.request_id;
  setText(id, name);
  id.title = name;
  setText(phase, WORDS[request.phase] ?? request.phase);
  const [bar, text] = progress.children;
  bar.hidden = request.phase !== "prefill";
  bar.max = toCompute(request);
  bar.value = request.computed_tokens;
  bar.setAttribute("aria-label", "tokens computed");
  setText(text, progressText(request));
  setText(prompt, count(request.prompt_tokens));
  setText(made, count(request.new_tokens));
  setText(age, seconds(request.age_s));
  setText(worker, request.worker);
}

/** Of one in prefill: one that was preempted computes its answer so far again, too. */
const toCompute = ({ prompt_tokens, new_tokens }) => prompt_tokens + new_tokens;

function progressText(request) {
  if (request.phase === "waiting") return "in the queue";
  if (request.phase === "decode") return `${count(request.new_tokens)} new`;
  return `${count(request.computed_tokens)} of ${count(toCompute(request))}`;
}

/** One row of `body` for each of `requests`, which come in the order in which they are to stand. */
export function showRequests(body, requests) {
  while (body.rows.length > requests.length) body.deleteRow(-1);
  while (body.rows.length < requests.length) body.append(newRow());
  requests.forEach((request, i) => fill(body.rows[i], request));
}
