// Formats numbers and times for people.

export const milliseconds = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`);
export const rate = (value) => (value === null || value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));
export const share = (value) => `${Math.round(value * 100)} %`;
export const age = (seconds) => (seconds < 10 ? `${seconds.toFixed(1)} s` : `${seconds.toFixed(0)} s`);
export const clock = (date) => date.toLocaleTimeString([], { hour12: false });
export const shorter = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
