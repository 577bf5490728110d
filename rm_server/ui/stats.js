// What the page computes from rewards. Pure; the same definitions as rm_client (a test compares them).

const ZERO_SPREAD = 1e-6;
const EPS = 1e-4;

// Probability that a beats b under Bradley-Terry at this temperature.
export const beats = (a, b, temperature) => 1 / (1 + Math.exp(-(a - b) / temperature));

// (r − mean) / (std + eps); 0 for a missing reward, a group of one, and a group without spread.
export function advantages(rewards, ddof) {
  const present = rewards.filter((reward) => reward !== null);
  const count = present.length;
  const mean = present.reduce((sum, reward) => sum + reward, 0) / count;
  const spread = Math.max(...present) - Math.min(...present);
  if (count < 2 || spread <= ZERO_SPREAD * Math.max(...present.map(Math.abs))) return rewards.map(() => 0);
  const std = Math.sqrt(present.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (count - ddof));
  return rewards.map((reward) => (reward === null ? 0 : (reward - mean) / (std + EPS)));
}

// 1 for the highest; equal rewards share a rank; null without a reward.
export function ranks(rewards) {
  return rewards.map((reward) => (reward === null ? null : 1 + rewards.filter((other) => other !== null && other > reward).length));
}

export function quantile(values, share) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return NaN;
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  return sorted[low] + (place - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}

// Differences to the token before; the first has none. A value that is missing takes its two differences along.
export function changes(rewards) {
  return rewards.map((reward, i) => (i === 0 || reward === null || rewards[i - 1] === null ? null : reward - rewards[i - 1]));
}

// −5 … 5: how far a value is from the middle, against what counts as far.
export function level(value, middle, far) {
  if (value === null || !(far > 0)) return 0;
  const share = Math.min(Math.abs(value - middle) / far, 1);
  return Math.sign(value - middle) * (share < 0.08 ? 0 : Math.ceil(share * 5));
}

// Round steps for an axis from low to high.
export function ticks(low, high, count = 4) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// What a small chart writes at its axis: at least two values, or its scale could not be read.
export function marks(low, high) {
  const round = ticks(low, high, 2);
  if (round.length === 1) return [round[0], high - round[0] < round[0] - low ? low : high];
  return round.length ? round : [low, high];
}
