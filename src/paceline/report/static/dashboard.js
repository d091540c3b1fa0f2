// The live page: a table of all runs, curves of those that are ticked, and one of them in detail.
"use strict";

const $ = (id) => document.getElementById(id);
const runs = new Map(), curves = new Map(), slots = new Map();
const MOST = 12;
const plotly = Object.assign(document.createElement("script"), { src: document.currentScript.dataset.plotly });
let shown = new Set(), focus = "", source = null, chosen = null, along = "steps";
let unread = 0;
let order = { key: "", down: true }, details = null, log = { name: "", next: null }, dirty = true;

const short = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(digits))}${letter}`;
  }
  return `${Number(value.toPrecision(digits))}`;
};
const clock = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
};
const mib = (bytes) => (bytes == null ? "–" : `${short(bytes / 2 ** 20, 4)} MiB`);
const make = (tag, props = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
};

// A run keeps its colour as long as it is shown.
const slot = (name) => {
  if (!slots.has(name)) {
    const taken = new Set(slots.values());
    let free = 0;
    while (taken.has(free)) free += 1;
    slots.set(name, free);
  }
  return slots.get(name);
};

const show = (names) => {
  shown = new Set(names.slice(-MOST));
  for (const name of [...slots.keys()]) if (!shown.has(name)) slots.delete(name);
  for (const name of [...curves.keys()]) if (!shown.has(name)) curves.delete(name);
  shown.forEach(slot);
  listen();
};

const choose = (names) => {
  chosen = true;
  show(names);
};

const newest = () => {
  const all = [...runs.values()].sort((a, b) => (b.state === "running") - (a.state === "running") || String(b.updated_at).localeCompare(String(a.updated_at)));
  const now = all.filter((run) => run.state === "running");
  return (now.length ? now : all).slice(0, 6).map((run) => run.name);
};

const listen = () => {
  if (source) source.close();
  curves.clear();
  const query = new URLSearchParams([...shown].map((name) => ["show", name]));
  if (focus) query.set("focus", focus);
  source = new EventSource(`/events?${query}`);
  source.onopen = () => { $("link").textContent = "live"; $("link").classList.remove("lost"); };
  source.onerror = () => { $("link").textContent = "no connection; retrying"; $("link").classList.add("lost"); };
  source.onmessage = (message) => take(JSON.parse(message.data));
};

const take = (news) => {
  for (const name of news.gone) { runs.delete(name); shown.delete(name); }
  for (const run of news.runs) runs.set(run.name, run);
  for (const part of news.curves) {
    const held = curves.get(part.name) || {};
    held[part.kind] = part.from ? held[part.kind].slice(0, part.from).concat(part.points) : part.points;
    curves.set(part.name, held);
  }
  unread = news.unread;
  if (news.focus && news.focus.name === focus) details = news.focus;
  dirty = true;
  // Until the reader has chosen runs, show the running ones, including those that start later.
  const working = [...runs.values()].filter((run) => run.state === "running").map((run) => run.name).sort().join();
  if (!unread && runs.size && (chosen === null || (chosen !== true && working && working !== chosen))) {
    chosen = working;
    const names = newest();
    focus = names[0] || "";
    details = null;
    show(names);
  }
};

const row = (run) => {
  const tick = make("input", { type: "checkbox", checked: shown.has(run.name), ariaLabel: `show ${run.name}` });
  tick.onchange = () => choose(tick.checked ? [...shown, run.name] : [...shown].filter((name) => name !== run.name));
  const name = make("button", { type: "button", textContent: run.name, ariaLabel: `details of ${run.name}` });
  name.onclick = () => { focus = run.name; details = null; log = { name: "", next: null }; choose(shown.has(run.name) ? [...shown] : [...shown, run.name]); };
  const cell = make("td", { className: "name" });
  if (shown.has(run.name)) cell.append(Charts.sample(slot(run.name)));
  cell.append(name, make("small", { textContent: `${run.algo} · ${run.env} · ${run.engine}${run.workers > 1 ? ` × ${run.workers}` : ""} · seed ${run.seed ?? 0}` }));
  const steps = make("td", { className: "number" }, short(run.env_steps));
  if (run.progress !== null && run.state === "running") steps.append(make("progress", { value: run.progress, ariaLabel: "progress" }));
  return make("tr", { className: run.name === focus ? "focus" : "" }, make("td", {}, tick), cell,
    make("td", {}, make("span", { className: `state ${run.state}`, textContent: run.state, title: run.reason })),
    make("td", { className: "number" }, short(run.return_mean)), steps,
    make("td", { className: "number" }, short(run.steps_per_second)), make("td", { className: "number" }, clock(run.wall_seconds)));
};

const listed = () => {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (run) => words.every((word) => `${run.name} ${run.env} ${run.algo} ${run.engine} ${run.state}`.toLowerCase().includes(word));
  const found = [...runs.values()].filter(fits);
  if (!order.key) return found.sort((a, b) => (b.state === "running") - (a.state === "running") || String(b.updated_at).localeCompare(String(a.updated_at)));
  const value = (run) => run[order.key] ?? -Infinity;
  return found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (order.down ? -1 : 1));
};

const table = () => {
  if ($("runs").contains(document.activeElement) && document.activeElement.matches(":focus-visible")) {
    // Keep the keyboard focus.
    const at = document.activeElement.ariaLabel;
    $("runs").replaceChildren(...listed().map(row));
    const again = [...$("runs").querySelectorAll("input, button")].find((element) => element.ariaLabel === at);
    if (again) again.focus();
  } else $("runs").replaceChildren(...listed().map(row));
  $("empty").hidden = runs.size + unread > 0;
  const counts = {};
  for (const run of runs.values()) counts[run.state] = (counts[run.state] || 0) + 1;
  const said = Object.entries(counts).map(([state, count]) => `${count} ${state}`);
  $("counts").textContent = [...said, ...(unread ? [`${unread} not read yet`] : [])].join(" · ");
};

// The speed of single iterations is noisy: show the mean of nine, fewer at the ends.
const smooth = (values) => values.map((_, i) => {
  const near = values.slice(Math.max(0, i - 4), i + 5);
  return near.reduce((sum, value) => sum + value, 0) / near.length;
});

const plots = () => {
  const at = along === "steps" ? 0 : 1, names = [...shown].filter((name) => runs.has(name));
  const pick = (points, y) => {
    const kept = points.filter((point) => point[at] !== null && point[y] !== null);
    const values = kept.map((point) => point[y]);
    return { x: kept.map((point) => point[at]), mean: y === 3 ? smooth(values) : values };
  };
  const dots = (points) => ({ x: points.map((point) => point[0]), y: points.map((point) => point[1]) });
  const series = (y) => names.map((name) => {
    const { training = [], evaluation = [] } = curves.get(name) || {};
    return { label: name, slot: slot(name), members: [], [along]: pick(training, y), dots: y === 2 ? dots(evaluation) : null };
  });
  const x = { steps: "environment steps", wall: "seconds" };
  Charts.draw($("returns"), { kind: "curves", x, y: "return", series: series(2) }, { x: along, height: 320, uirevision: along });
  Charts.draw($("speed"), { kind: "curves", x, y: "steps/s", series: series(3), tozero: true }, { x: along, height: 260, uirevision: along, unnamed: true });
  const split = names.map((name) => runs.get(name).split);
  bars($("split"), names, split);
};

const bars = (element, rows, split) => {
  const parts = ["start", "env", "act", "learn", "sync", "eval", "save", "idle"].filter((part) => split.some((one) => one[part]));
  element.hidden = !rows.length;
  if (rows.length) Charts.draw(element, { kind: "split", rows, parts: parts.map((name) => ({ name, seconds: split.map((one) => one[name] || 0) })) }, {});
};

const facts = () => {
  const run = runs.get(focus);
  $("focus").hidden = !run;
  if (!run) return;
  $("focus-name").textContent = run.name;
  $("focus-verdict").textContent = [run.reason, details && details.verdict].filter(Boolean).join(" · ");
  const about = details || {}, pairs = {
    state: run.state, iteration: run.iteration ?? "–", "best evaluation": short(run.best_return), device: about.device || "cpu",
    nodes: about.nodes ?? 1, workers: about.workers_healthy != null ? `${about.workers_healthy} of ${run.workers}` : run.workers,
    "workers lost": about.workers_lost ?? 0, memory: mib(about.memory_bytes ?? about.peak_memory_bytes),
    CPU: about.cpu_percent != null ? `${Math.round(about.cpu_percent)} %` : "–", resumed: about.resumed ?? 0, host: about.host || "–",
  };
  if (about.agent_steps != null) Object.assign(pairs, { "agent steps": short(about.agent_steps), "return per agent": short(about.return_per_agent_mean ?? null) });
  $("facts").replaceChildren(...Object.entries(pairs).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  const hosts = about.hosts || [];
  $("hosts").replaceChildren();
  if (hosts.length) {
    const head = ["node", "workers", "cores", "steps", "memory", "CPU seconds"];
    $("hosts").append(make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { textContent: text, className: i ? "number" : "" })))));
    $("hosts").append(make("tbody", {}, ...hosts.map((h) => make("tr", {}, make("th", { textContent: `${h.host} ${h.address || ""}` }),
      ...[h.workers, h.cores, short(h.env_steps ?? null), mib(h.memory_bytes), short(h.cpu_seconds ?? null)].map((v) => make("td", { className: "number", textContent: v ?? "–" }))))));
  }
  const workers = Object.entries(about.worker_time_split || {});
  bars($("workers"), workers.map(([name]) => (/^\d+$/.test(name) ? `worker ${name}` : name)), workers.map(([, split]) => split));
  const names = about.logs || [];
  if ([...$("logs").options].map((option) => option.value).join() !== names.join()) {
    $("logs").replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
    if (!names.includes(log.name)) log = { name: names[0] || "", next: null };
    $("logs").value = log.name;
  }
  $("log-choice").hidden = !names.length;
  if (!names.length) $("log").textContent = "no logs: a single process writes none";
};

const readLog = async () => {
  if (!focus || !log.name || document.hidden) return;
  const of = focus, held = log;
  const query = new URLSearchParams({ run: of, file: held.name });
  if (held.next !== null) query.set("from", held.next);
  const answer = await fetch(`/log?${query}`).catch(() => null);
  if (!answer || !answer.ok || of !== focus || held !== log) return;
  const { text, next } = await answer.json();
  const box = $("log"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  if (held.next === null) box.textContent = text || "(still empty)";
  else if (text) box.textContent = (box.textContent + text).slice(-200000);
  held.next = next;
  if (atEnd || !text) box.scrollTop = box.scrollHeight;
};

const paint = () => {
  if (!dirty || document.hidden) return;
  dirty = false;
  table();
  if (!window.Plotly) return drawLater(); // still loading: the table is already usable
  plots();
  facts();
};

const drawLater = () => {
  if (plotly.parentNode || !runs.size) return;
  plotly.onload = () => { dirty = true; paint(); };
  requestAnimationFrame(() => setTimeout(() => document.head.append(plotly)));
};

$("filter").oninput = table;
$("newest").onclick = () => choose(newest());
$("none").onclick = () => choose([]);
$("logs").onchange = () => { log = { name: $("logs").value, next: null }; readLog(); };
for (const button of document.querySelectorAll("[data-sort]")) {
  button.onclick = () => { order = { key: button.dataset.sort, down: order.key === button.dataset.sort ? !order.down : button.dataset.sort !== "name" }; table(); };
}
for (const radio of document.querySelectorAll("[name=x]")) radio.onchange = () => { along = radio.value; dirty = true; paint(); };
document.addEventListener("visibilitychange", paint);
setInterval(paint, 250);
setInterval(readLog, 2000);
listen();
