"use strict";
// Numbers and axes: round ticks, their labels, and the pixels of values. Pure functions.

const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;
const TIME_STEPS_S = [
  1, 2, 5, 10, 15, 30, MINUTE_S, 120, 300, 600, 900, 1800,
  HOUR_S, 7200, 10800, 21600, 43200, DAY_S, 172800, 604800,
];

const roundStep = (rough) => {
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * magnitude).find((step) => step >= rough * (1 - 1e-9));
};

const multiples = (step, low, high) => {
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index <= Math.floor(high / step + 1e-9); index++)
    ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
};

// Multiples of 1, 2 or 5 times a power of ten within [low, high], at most `about` intervals.
const linearTicks = (low, high, about, whole) => {
  const step = roundStep((high - low) / about);
  return multiples(whole ? Math.max(1, step) : step, low, high);
};

// Powers of ten within [low, high]; between them 2 and 5 where there are few.
const logTicks = (low, high, about) => {
  const powers = multiples(1, Math.log10(low), Math.log10(high));
  const stride = Math.max(1, Math.ceil(powers.length / about));
  if (powers.length > 2) return powers.filter((_, index) => index % stride === 0).map((p) => 10 ** p);
  const first = Math.floor(Math.log10(low));
  const ticks = [0, 1, 2, 3].flatMap((up) => [1, 2, 5].map((factor) => factor * 10 ** (first + up)));
  const within = ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
  return within.length > 1 ? within : linearTicks(low, high, about, false);
};

const timeTicks = (low, high, about) => {
  const rough = (high - low) / about;
  if (rough < 1) return linearTicks(low, high, about, false);
  const step = TIME_STEPS_S.find((each) => each >= rough) ?? roundStep(rough / DAY_S) * DAY_S;
  return multiples(step, low, high);
};

const numberLabel = (value) => {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 });
};

const countLabel = (value) => value.toLocaleString("en-US");

const timeLabel = (seconds) => {
  if (seconds < MINUTE_S) return `${Number(seconds.toFixed(1))}s`;
  const total = Math.round(seconds);
  const [hours, minutes, rest] = [
    Math.floor(total / HOUR_S),
    Math.floor((total % HOUR_S) / MINUTE_S),
    total % MINUTE_S,
  ];
  if (hours) return minutes ? `${hours}h ${String(minutes).padStart(2, "0")}m` : `${hours}h`;
  return rest ? `${minutes}m ${String(rest).padStart(2, "0")}s` : `${minutes}m`;
};

// An axis from values to pixels; `invert` goes back. A logarithmic one has a low above 0.
const axisOf = (low, high, start, end, isLog = false) => {
  const on = isLog ? Math.log10 : (value) => value;
  const [from, to] = [on(low), on(high)];
  const pixel = (value) => Math.round((start + ((on(value) - from) / (to - from)) * (end - start)) * 10) / 10;
  const invert = (at) => low + ((at - start) / (end - start)) * (high - low);
  return { low, high, start, end, isLog, pixel, invert };
};

// The index of the value nearest to `x` in a sorted list that is not empty.
const nearest = (xs, x) => {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
};

// First and past-last index of the rows within [low, high].
const rowsWithin = (xs, low, high) => {
  let first = 0;
  while (first < xs.length && xs[first] < low) first++;
  let pastLast = xs.length;
  while (pastLast > first && xs[pastLast - 1] > high) pastLast--;
  return [first, pastLast];
};
