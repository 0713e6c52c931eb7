const tip = document.getElementById("tip");
function show(mark, x, y) {
  tip.textContent = mark.dataset.tip;
  tip.classList.add("shown");
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = x + gap + box.width > innerWidth ? x - gap - box.width : x + gap;
  const top = y + gap + box.height > innerHeight ? y - gap - box.height : y + gap;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
function markOf(event) { return event.target.closest ? event.target.closest("[data-tip]") : null; }
document.addEventListener("pointermove", (event) => {
  const mark = markOf(event);
  if (mark) show(mark, event.clientX, event.clientY); else tip.classList.remove("shown");
});
document.addEventListener("pointerdown", (event) => { const mark = markOf(event); if (mark) show(mark, event.clientX, event.clientY); });
document.addEventListener("focusin", (event) => {
  const mark = markOf(event);
  if (!mark) return;
  const box = mark.getBoundingClientRect();
  show(mark, box.left + box.width / 2, box.bottom);
});
document.addEventListener("focusout", () => tip.classList.remove("shown"));
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0], column = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => { const cell = row.cells[column].dataset.value; return isNaN(cell) ? cell : Number(cell); };
    const rows = [...body.rows].sort((a, b) => (value(a) < value(b) ? 1 : value(a) > value(b) ? -1 : 0) * (down ? 1 : -1));
    body.append(...rows);
  });
}
