"use strict";
// Numbers, counts and times as words, and places in sorted lists. Pure functions.

const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;

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
