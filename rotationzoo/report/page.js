// Unfolds the part of a page that an address names, and all parts before the page is printed.
"use strict";

function unfold() {
  const named = document.querySelector(":target");
  const part = named && named.closest("details");
  if (!part || part.open) return;
  part.open = true;
  named.scrollIntoView();
}

addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
unfold();
