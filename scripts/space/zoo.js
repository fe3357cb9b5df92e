// Searches and sorts the table of a zoo, and copies its commands. Each entry is a tbody of two
// rows. Without this script, all entries are there, sorted by model.
"use strict";

const table = document.getElementById("zoo");
const entries = table ? [...table.tBodies] : [];
const shown = document.getElementById("shown");

function search() {
  const words = query.value.toLowerCase().split(/\s+/);
  let count = 0;
  for (const entry of entries) {
    const text = entry.textContent.toLowerCase();
    entry.hidden = !words.every((word) => text.includes(word));
    count += !entry.hidden;
  }
  shown.textContent = `${count} of ${entries.length} shown`;
}

// Entries without a value come last, whichever way the others are sorted.
function compare(a, b) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [Number(a), Number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  return a < b ? -1 : Number(a > b);
}

function sort(header) {
  const column = header.cellIndex;
  const before = header.getAttribute("aria-sort");
  const first = "descending" in header.dataset ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const now = before === first ? other : first;
  const value = (entry) => entry.rows[0].cells[column].dataset.value;
  const sign = now === "ascending" ? 1 : -1;
  entries.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = compare(x, y);
    return x === undefined || y === undefined ? order : sign * order;
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", now);
  table.append(...entries);
}

for (const header of table ? table.tHead.rows[0].cells : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...header.childNodes);
  button.addEventListener("click", () => sort(header));
  header.append(button);
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    // A page from disk may not write to the clipboard: the reader copies what is selected.
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

for (const button of document.querySelectorAll(".copy")) {
  button.hidden = false;
  button.addEventListener("click", () => copy(button));
}
const query = document.getElementById("query");
query.addEventListener("input", search);
document.getElementById("search").hidden = entries.length === 0;
search();
