// Starts the page.

load(JSON.parse(document.getElementById("data").textContent));
page.drawn.forEach(listenTo);
for (const button of document.querySelectorAll("[data-x]"))
  button.addEventListener("click", () => {
    Object.assign(page.view, { x: button.dataset.x, isZoomed: false });
    hideReadout();
    redraw();
  });
document.getElementById("show-all").addEventListener("click", () => zoomTo(null));

let drawnWidth = window.innerWidth;
new ResizeObserver(() => {
  if (window.innerWidth === drawnWidth) return;
  drawnWidth = window.innerWidth;
  redraw();
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
const setPrinted = (isPrinted) => {
  page.isPrinted = isPrinted;
  document.documentElement.classList.toggle("printed", isPrinted);
  redraw();
};
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  setPrinted(true);
});
window.addEventListener("afterprint", () => setPrinted(false));
document.documentElement.dataset.charts = String(page.drawn.length);
