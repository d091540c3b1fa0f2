// Unpack plotly, draw the charts on the screen first, and the others afterwards.
"use strict";

const nonce = document.currentScript.nonce;
const charts = JSON.parse(document.getElementById("charts").textContent);
const options = {};

for (const swatch of document.querySelectorAll("[data-slot]")) swatch.replaceWith(Charts.sample(Number(swatch.dataset.slot)));

const unpack = async () => {
  const letters = atob(document.getElementById("plotly").textContent), packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) packed[i] = letters.charCodeAt(i);
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = text;
  document.head.append(script);
};

const draw = (id) => {
  Charts.draw(document.getElementById(id), charts[id], options[id] || {});
  if (!performance.getEntriesByName("plot").length) performance.mark("plot");
};

const start = async () => {
  try {
    await unpack();
  } catch {
    document.getElementById("no-plots").hidden = false;
    return;
  }
  const waiting = new Set(Object.keys(charts));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !waiting.delete(entry.target.id)) continue;
      seen.unobserve(entry.target);
      draw(entry.target.id);
    }
  }, { rootMargin: "100px" });
  waiting.forEach((id) => seen.observe(document.getElementById(id)));
  // Draw the remaining charts one by one, so that a printed page has them all.
  const rest = () => {
    const [id] = waiting;
    if (id === undefined) return document.documentElement.classList.add("drawn");
    waiting.delete(id);
    draw(id);
    setTimeout(rest, 30);
  };
  setTimeout(rest, 100);
};

for (const controls of document.querySelectorAll("[data-for]")) {
  controls.addEventListener("change", (event) => {
    const { option } = event.target.dataset, id = controls.dataset.for;
    options[id] = { ...options[id], [option]: event.target.type === "checkbox" ? event.target.checked : event.target.value };
    draw(id);
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // a page opened as a file may not use the clipboard
    }
  });
}
start();
