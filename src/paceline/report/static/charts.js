// Plots of the report and the dashboard. A chart is plain data (see charts.py); colours come from the style sheet.
"use strict";

const Charts = (() => {
  const drawn = new Map();
  const DASHES = ["solid", "dash", "dot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (slot) => css(`--c${slot % 7}`);
  const dash = (slot) => DASHES[Math.floor(slot / 7) % DASHES.length];
  // A sample of the line that a slot is drawn with, for tables and legends.
  const sample = (slot, style = { dash: "dashed", dot: "dotted" }[dash(slot)] || "solid") => {
    const found = document.createElement("span");
    found.className = "swatch";
    found.style.borderTop = `3px ${style} var(${slot === null ? "--soft" : `--c${slot % 7}`})`;
    return found;
  };
  // Escape text of runs: plotly interprets some HTML.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const faint = (hex, opacity) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  };

  const axis = (title, extra = {}) => ({
    title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: css("--grid"), linecolor: css("--line"),
    zerolinecolor: css("--line"), tickfont: { size: 11 }, automargin: true, ...extra,
  });

  const layout = (extra) => ({
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 360,
    margin: { l: 56, r: 12, t: narrow() ? 12 : 30, b: 44 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
    legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", font: { size: 12, color: css("--ink") }, itemsizing: "constant" },
    ...extra,
  });

  const narrow = () => window.innerWidth < 640;

  // A threshold far away would flatten the curves, so a note replaces the line.
  const threshold = (chart, traces) => {
    const at = chart.threshold, text = `${chart.threshold_label || "solved"} at ${at}`;
    let low = Infinity, high = -Infinity;
    for (const trace of traces) for (const y of trace.y) if (y !== null) [low, high] = [Math.min(low, y), Math.max(high, y)];
    const room = 1.5 * Math.max(high - low, 0.25 * Math.abs(high));
    if (at <= high + room && at >= low - room) return dashed(at, text);
    const note = { xref: "paper", yref: "paper", x: 0.01, y: 1, xanchor: "left", yanchor: "top", showarrow: false, font: { size: 11, color: css("--soft") } };
    return { annotations: [{ ...note, text: `${text}, ${at > high ? "far above" : "far below"} the curves` }] };
  };

  // Label at the left, where curves are still low.
  const dashed = (at, text) => ({
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: at, y1: at, line: { color: css("--soft"), width: 1, dash: "dash" }, layer: "below" }],
    annotations: [{ xref: "paper", x: 0.01, y: at, xanchor: "left", yanchor: "bottom", text, showarrow: false, font: { size: 11, color: css("--soft") } }],
  });

  // Names of bars; on a phone they wrap, so that the bars keep their width.
  const names = (rows) => rows.map((text) => {
    if (!narrow()) return plain(text);
    const lines = [""];
    for (const word of String(text).split(" ")) {
      if ((lines.at(-1) + word).length > 14 && lines.at(-1)) lines.push("");
      lines[lines.length - 1] += `${word} `;
    }
    return lines.map((line) => plain(line.trim())).join("<br>");
  });

  // series: [{label, slot, steps, wall: {x, mean, low, high}, members: [{label, steps, wall, y}], dots: {x, y} of steps}]
  const curves = (chart, options) => {
    const along = options.x || "steps", traces = [];
    for (const s of chart.series.filter((one) => !options.hidden.has(one.label))) {
      const c = colour(s.slot), band = s[along], group = s.label;
      const member = !options.members ? [] : s.members;
      for (const m of member) {
        traces.push({ x: m[along], y: m.y, mode: "lines", line: { color: faint(c, 0.4), width: 1 }, legendgroup: group,
          showlegend: false, name: plain(m.label), hovertemplate: `%{y:.4~g}<extra>${plain(m.label)}</extra>` });
      }
      if (band.low) {
        traces.push({ x: [...band.x, ...band.x.slice().reverse()], y: [...band.high, ...band.low.slice().reverse()],
          fill: "toself", fillcolor: faint(c, 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
          legendgroup: group, showlegend: false, type: "scatter" });
      }
      traces.push({ x: band.x, y: band.mean, mode: band.x.length < 2 ? "markers" : "lines", name: plain(s.label), legendgroup: group,
        line: { color: c, width: 2.2, dash: dash(s.slot) }, marker: { color: c }, customdata: band.low ? band.low.map((low, i) => [low, band.high[i]]) : undefined,
        hovertemplate: band.low ? "%{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})" : "%{y:.4~g}" });
      if (s.dots && along === "steps" && s.dots.x.length) {
        traces.push({ x: s.dots.x, y: s.dots.y, mode: "lines+markers", name: plain(`${s.label}, evaluation`), legendgroup: group, showlegend: false,
          line: { color: c, width: 1.2, dash: "dot" }, marker: { color: css("--page"), size: 7, line: { color: c, width: 2 } }, hovertemplate: "%{y:.4~g}" });
      }
    }
    const line = chart.threshold == null || !traces.length ? {} : threshold(chart, traces);
    const legend = chart.series.map((s) => [s.label, sample(s.slot)]);
    return [traces, layout({ ...line, showlegend: false, height: options.width ? 250 : narrow() ? 280 : 340, hovermode: "x unified", xaxis: axis(chart.x[along], { rangemode: "tozero", hoverformat: ".4~s" }), yaxis: axis(chart.y, chart.tozero ? { rangemode: "tozero" } : {}) }), legend];
  };

  // series: [{label, slot, x, y, low, high}]; ideal: {x, y}; guess: [{label, slot, x, y, low, high}]
  const points = (chart, options) => {
    const traces = [], ticks = [...new Set(chart.series.flatMap((s) => s.x).concat(chart.ideal ? chart.ideal.x : []))].sort((a, b) => a - b);
    if (chart.ideal && !options.hidden.has("ideal")) traces.push({ x: chart.ideal.x, y: chart.ideal.y, mode: "lines", name: "ideal", line: { color: css("--soft"), width: 1, dash: "dash" }, hoverinfo: "skip" });
    for (const s of chart.series.filter((one) => !options.hidden.has(one.label))) {
      const c = colour(s.slot);
      traces.push({ x: s.x, y: s.y, mode: "lines+markers", name: plain(s.label), line: { color: c, width: 2, dash: s.guess ? "dot" : "solid" },
        marker: { color: s.guess ? css("--page") : c, size: s.guess ? s.x.map((_, i) => (i ? 9 : 0)) : 9, symbol: SYMBOLS[s.slot % 7], line: { color: c, width: 2 } },
        error_y: s.low ? { type: "data", symmetric: false, array: s.high.map((v, i) => v - s.y[i]), arrayminus: s.low.map((v, i) => s.y[i] - v), color: c, thickness: 1.5, width: 5 } : undefined,
        customdata: s.low ? s.low.map((low, i) => [low, s.high[i]]) : undefined,
        hovertemplate: `%{x} ${chart.unit}: %{y:${chart.format}}` + (s.low ? ` (%{customdata[0]:${chart.format}} to %{customdata[1]:${chart.format}})` : "") });
    }
    const y = { rangemode: "tozero", tickformat: chart.format === ".0%" ? ".0%" : undefined };
    const legend = [...(chart.ideal ? [["ideal", sample(null, "dashed")]] : []), ...chart.series.map((s) => [s.label, sample(s.slot, s.guess ? "dotted" : "solid")])];
    return [traces, layout({ showlegend: false, height: 310, xaxis: axis(chart.x, { type: "log", tickvals: ticks, ticktext: ticks.map(String), minor: { ticks: "" } }), yaxis: axis(chart.y, y) }), legend];
  };

  // rows: labels; parts: [{name, seconds: []}]
  const split = (chart, options) => {
    const share = options.unit !== "seconds", totals = chart.rows.map((_, i) => chart.parts.reduce((sum, p) => sum + p.seconds[i], 0));
    const traces = chart.parts.map((p) => {
      const part = p.seconds.map((v, i) => (totals[i] ? v / totals[i] : 0)), light = ["idle", "act", "save"].includes(p.name);
      return { type: "bar", orientation: "h", name: p.name, y: names(chart.rows), x: share ? part : p.seconds,
        marker: { color: css(`--part-${p.name}`), line: { color: css("--page"), width: 1 } },
        text: part.map((v) => (v >= (narrow() ? 0.12 : 0.06) ? `${p.name} ${Math.round(100 * v)} %` : "")), textposition: "inside", insidetextanchor: "middle", textangle: 0,
        constraintext: "both", textfont: { size: 11, color: css(light ? "--part-text-dark" : "--part-text") },
        customdata: p.seconds.map((v, i) => [v, part[i]]), hovertemplate: `${p.name}: %{customdata[0]:.3~g} s, %{customdata[1]:.1%}<extra>%{y}</extra>` };
    });
    const x = share ? { tickformat: ".0%", range: [0, 1] } : { rangemode: "tozero" };
    const height = 110 + (narrow() ? 56 : 44) * chart.rows.length;
    return [traces, layout({ barmode: "stack", uniformtext: { mode: "hide", minsize: 9 }, bargap: 0.35, height, xaxis: axis(share ? "share of the time" : "seconds", x),
      legend: { ...layout({}).legend, y: -70 / (height - 60), traceorder: "normal" },
      yaxis: axis("", { autorange: "reversed", tickfont: { size: 12, color: css("--ink") }, ticklabelstandoff: 6 }) })];
  };

  // rows: labels; series: [{label, slot, values}]
  const bars = (chart) => {
    const traces = chart.series.map((s) => ({ type: "bar", orientation: "h", name: plain(s.label), y: names(chart.rows), x: s.values,
      marker: { color: colour(s.slot) }, hovertemplate: `%{x:${chart.format}}<extra>%{y}</extra>` }));
    const x = axis(chart.x, { rangemode: "tozero", tickformat: chart.format === ".0%" ? ".0%" : undefined });
    return [traces, layout({ bargap: 0.4, height: 90 + (narrow() ? 62 : 34) * chart.rows.length * chart.series.length, showlegend: chart.series.length > 1, xaxis: x,
      yaxis: axis("", { autorange: "reversed", tickfont: { size: 12, color: css("--ink") } }) })];
  };

  // rows: hosts; spans: [{row, phase, detail, from, to, slot}]
  const timeline = (chart) => {
    const phases = [...new Set(chart.spans.map((s) => s.phase))], traces = [];
    phases.forEach((phase, i) => {
      const own = chart.spans.filter((s) => s.phase === phase);
      traces.push({ type: "bar", orientation: "h", name: plain(phase), y: names(own.map((s) => s.row)), base: own.map((s) => s.from), x: own.map((s) => s.to - s.from),
        marker: { color: colour(i), pattern: { shape: ["", "/", "."][Math.floor(i / 7) % 3], fillmode: "overlay", fgcolor: css("--page"), solidity: 0.25 } }, customdata: own.map((s) => [plain(s.detail), s.from, s.to]),
        hovertemplate: `${plain(phase)}: %{customdata[1]:.4~g} to %{customdata[2]:.4~g} s<br>%{customdata[0]}<extra>%{y}</extra>` });
    });
    const height = 120 + 36 * chart.rows.length;
    return [traces, layout({ barmode: "overlay", bargap: 0.45, height, xaxis: axis("seconds since the launcher began", { rangemode: "tozero" }),
      legend: { ...layout({}).legend, y: -70 / (height - 60) },
      yaxis: axis("", { categoryorder: "array", categoryarray: names(chart.rows), autorange: "reversed", tickfont: { size: 12, color: css("--ink") } }) })];
  };

  const kinds = { curves, points, split, bars, timeline };

  // The legend is part of the page below the plot, so it wraps without shrinking the plot. A click hides or shows a line.
  const legends = (element, entries, hidden) => {
    let list = element.nextElementSibling;
    if (!list || !list.matches(".legend")) {
      list = document.createElement("div");
      list.className = "legend";
      element.after(list);
    }
    const key = JSON.stringify([entries.map(([label, line]) => [label, line.style.borderTop]), [...hidden]]);
    if (list.dataset.key === key) return;
    list.dataset.key = key;
    const at = [...list.children].indexOf(document.activeElement);
    list.replaceChildren(...entries.map(([label, line]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.ariaPressed = String(!hidden.has(label));
      button.append(line, label);
      button.onclick = () => {
        if (!hidden.delete(label)) hidden.add(label);
        draw(element, ...drawn.get(element));
      };
      return button;
    }));
    if (at >= 0 && list.children[at]) list.children[at].focus();
  };

  const hidden = new WeakMap();

  const draw = (element, chart, options = {}) => {
    drawn.set(element, [chart, options]);
    if (!hidden.has(element)) hidden.set(element, new Set());
    const [traces, look, entries] = kinds[chart.kind](chart, { ...options, hidden: hidden.get(element) });
    if (entries && !options.unnamed) legends(element, entries, hidden.get(element));
    if (options.height) look.height = options.height;
    if (options.uirevision) look.uirevision = options.uirevision;
    if (options.width) look.width = options.width;
    else look.autosize = true;
    // Buttons only on a large screen: on a phone they would cover the curves.
    return Plotly.react(element, traces, look, { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { format: "svg", filename: "paceline" } });
  };

  const again = (change = {}) => { for (const [element, [chart, options]] of drawn) draw(element, chart, { ...options, ...change }); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again());
  // Print in light colours and at the width of the paper.
  addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; again({ width: 660 }); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; again({ width: undefined }); });

  return { draw, sample };
})();
