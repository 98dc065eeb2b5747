// What the counters said at the last looks, and what has changed between them.

export const PHASES = ["decode", "demand", "streamed"];
export const SPAN_S = 120; // that the link's chart shows
const RECENT_S = 30; // over which "now" is told

/** Counters of the engine begin anew with it: whatever counts up and has fallen says so. */
const begunAnew = (before, now) =>
  now.generated_tokens < before.generated_tokens || PHASES.some((phase) => now[phase].lookups < before[phase].lookups);

export class History {
  constructor() {
    this.looks = []; // [{at, stats}] since the engine's start, oldest first
    this.samples = []; // [{at, rates}] of link use; null rates where nothing is known
  }

  /** The engine does not answer, or nobody has looked for a while. */
  interrupt(at) {
    this.looks = [];
    if (this.samples.at(-1)?.rates) this.samples.push({ at, rates: null });
  }

  add(at, stats) {
    const last = this.looks.at(-1);
    if (last && at <= last.at) return;
    if (last && (begunAnew(last.stats, stats) || at - last.at > 10)) this.interrupt(at);
    else if (last) this.samples.push({ at, rates: rates(last, { at, stats }) });
    this.looks.push({ at, stats });
    const old = (one) => at - one.at > SPAN_S + 5;
    this.samples = this.samples.filter((one) => !old(one));
    this.looks = this.looks.filter((one) => at - one.at <= RECENT_S);
  }

  /** How much `figure(stats)` has grown since a while ago. */
  growth(figure) {
    if (!this.looks.length) return 0;
    return figure(this.looks.at(-1).stats) - figure(this.looks[0].stats);
  }

  /** Of `figure(stats)`, per second over the last few looks. */
  rate(figure) {
    const [before, now] = [this.looks.at(-4) ?? this.looks[0], this.looks.at(-1)];
    return now && now.at > before.at ? (figure(now.stats) - figure(before.stats)) / (now.at - before.at) : 0;
  }
}

function rates(before, now) {
  const copied = (phase) => now.stats[phase].copied_nbytes - before.stats[phase].copied_nbytes;
  return Object.fromEntries(PHASES.map((phase) => [phase, copied(phase) / (now.at - before.at)]));
}
