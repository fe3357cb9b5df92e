// Shows the value of a chart's mark beside it, under the pointer or the keyboard's focus. A chart
// is one stop of the Tab key; arrow keys move from mark to mark, Home and End to the ends.
"use strict";

const MARK = "[role~='graphics-symbol'][aria-label]";
const bubble = document.body.appendChild(document.createElement("div"));
bubble.id = "value";
bubble.hidden = true;
bubble.setAttribute("aria-hidden", "true"); // a screen reader reads the mark's own label

function show(mark) {
  bubble.hidden = !mark;
  if (!mark) return;
  bubble.textContent = mark.getAttribute("aria-label");
  const box = mark.getBoundingClientRect();
  const edge = document.documentElement.clientWidth - bubble.offsetWidth - 8;
  const above = box.top - bubble.offsetHeight - 8;
  bubble.style.left = `${Math.max(8, Math.min(box.left, edge))}px`;
  bubble.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}

function center(mark) {
  const box = mark.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
}

// The nearest mark in a direction; a step aside counts three times as far as a step ahead.
function neighbour(marks, from, [dx, dy]) {
  const [x, y] = center(from);
  let nearest = null, least = Infinity;
  for (const mark of marks) {
    const [mx, my] = center(mark);
    const ahead = (mx - x) * dx + (my - y) * dy;
    const aside = Math.abs((mx - x) * dy) + Math.abs((my - y) * dx);
    const distance = ahead + 3 * aside;
    if (ahead > 0.5 && distance < least) [nearest, least] = [mark, distance];
  }
  return nearest;
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function move(event) {
  const marks = [...event.currentTarget.querySelectorAll(MARK)];
  const now = event.target.closest(MARK);
  let next = null;
  if (event.key === "Escape") bubble.hidden = true;
  if (event.key === "End") next = marks[marks.length - 1];
  else if (event.key === "Home" || (event.key in STEPS && !now)) next = marks[0];
  else if (event.key in STEPS) next = neighbour(marks, now, STEPS[event.key]) || now;
  if (!next) return;
  event.preventDefault();
  next.focus();
}

for (const chart of document.querySelectorAll("figure svg")) {
  if (!chart.querySelector(MARK)) continue;
  chart.tabIndex = 0;
  for (const mark of chart.querySelectorAll(MARK)) mark.tabIndex = -1;
  chart.addEventListener("keydown", move);
  chart.addEventListener("focusin", (event) => show(event.target.closest(MARK)));
  chart.addEventListener("focusout", () => show(null));
  chart.addEventListener("pointerover", (event) => show(event.target.closest(MARK)));
  chart.addEventListener("pointerleave", () => show(null));
}
// Focus itself scrolls, to a mark below the window.
addEventListener("scroll", () => show(document.activeElement.closest(MARK)), { passive: true });
