// Numbers as a person reads them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 1234567 -> "1,234,567". */
export const count = (value) => whole.format(value);

/** A share of `total` in percent; a dash where there is nothing to have a share of. */
export const percent = (part, total) => (total > 0 ? `${((100 * part) / total).toFixed(1)} %` : "–");

/** Three digits or so: 0.123, 1.23, 12.3, 123. */
export function digits(value) {
  if (value === 0) return "0";
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(3, places));
}

/** As `digits`, without zeros at the end: 50, 2.5. */
export const short = (value) => `${Number(value.toPrecision(3))}`;

const BYTES = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];

/** The unit in which `nbytes` has one to three digits before its point: [bytes in it, its name]. */
export const byteUnit = (nbytes) => BYTES.find(([size]) => nbytes >= size) ?? BYTES.at(-1);

/** 12345678 -> "12.3 MB". */
export function bytes(nbytes) {
  const [size, name] = byteUnit(nbytes);
  return `${digits(nbytes / size)} ${name}`;
}

/** Seconds, of whatever length: "3.2 s", "2 min 5 s", "1 h 12 min". */
export function seconds(value) {
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.floor(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The shortest way to write a bound of a histogram: "5 ms", "2 s". */
export const bound = (value) => (value < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : `${value} s`);
