// Draws the page's charts with plotly.js. All names come from checkpoints: they are only ever text.
"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const PALETTE = ["#4e79a7", "#59a14f", "#e0a43a", "#b07aa1", "#76b7b2", "#d37295", "#8c7a6b",
    "#6b8e9e", "#a0a04f", "#c9785d", "#7c83bd", "#9c9c9c"];
  // What the training waits for is warm, what writers do meanwhile is cool.
  const WARM = ["#d98f4e", "#c4624d", "#e3b85f", "#a9685b", "#cf8a7a"];
  const COOL = ["#4e79a7", "#76a5c4", "#6f8f7f", "#9db7b0", "#8b8fb5"];
  const STALLING = ["ready", "agree", "stage"];
  const SMALL = window.matchMedia("(max-width: 600px)");
  const DARK = window.matchMedia("(prefers-color-scheme: dark)");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const place = (id) => document.getElementById(id);
  // plotly.js reads some HTML in its texts.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const brief = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const inked = (number) => PALETTE[number % PALETTE.length];

  function size(nbytes) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let unit = 0;
    let value = nbytes;
    while (value >= 999.5 && unit + 1 < units.length) { value /= 1000; unit += 1; }
    return (unit ? Number(value.toPrecision(3)) : Math.round(value)) + " " + units[unit];
  }

  // Ticks at round sizes, in the unit of the largest.
  function sizeTicks(most) {
    const step = Math.pow(10, Math.floor(Math.log10(Math.max(most, 1) / 2)));
    const width = [1, 2, 5, 10].map((n) => n * step).find((n) => most / n <= 5) || 10 * step;
    const ticks = [];
    for (let at = 0; at <= most * 1.001; at += width) ticks.push(at);
    return { tickvals: ticks, ticktext: ticks.map(size) };
  }

  function layout(more) {
    const axis = {
      gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
      tickcolor: colour("--line"), automargin: true, fixedrange: true,
    };
    const { xaxis, yaxis, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: PALETTE,
      font: { family: "system-ui, sans-serif", size: 12.5, color: colour("--soft") },
      hoverlabel: {
        bgcolor: colour("--card"), bordercolor: colour("--line"), align: "left",
        font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 13 },
      },
      margin: { l: 8, r: 8, t: 10, b: 8 }, dragmode: false, hovermode: "closest",
      showlegend: false,
      xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
    };
  }

  function draw(where, traces, more) {
    Plotly.react(where, traces, layout(more), { displayModeBar: false, responsive: true });
  }

  function fillKeys(id, keys) {
    place(id).replaceChildren(...keys.map(([ink, text]) => {
      const item = document.createElement("li");
      const mark = document.createElement("i");
      mark.style.background = ink;
      item.append(mark, text);
      return item;
    }));
  }

  // --- a checkpoint ---------------------------------------------------------------------------

  function drawSizes() {
    const where = place("sizes");
    if (!where) return;
    const by = document.querySelector('input[name="colour"]:checked').value;
    const tree = facts.tree;
    const sums = new Map();
    for (const node of by === "dtype" ? facts.dtypes : facts.components) sums.set(node.name, node.nbytes);
    const names = [...sums.keys()];
    const inks = new Map(names.map((name, number) => [name, inked(number)]));
    const counted = (n) => n.toLocaleString("en") + (n === 1 ? " tensor" : " tensors");
    const share = (n) => (100 * n / (facts.tensor_nbytes || 1)).toPrecision(3) + "% of all";
    draw(where, [{
      type: "treemap", branchvalues: "total", sort: true,
      ids: tree.map((_, number) => "n" + number),
      parents: tree.map((node) => (node.parent === null ? "" : "n" + node.parent)),
      labels: tree.map((node, number) => (number ? plain(brief(node.name, 80)) || "(no name)" : "all")),
      values: tree.map((node) => node.nbytes),
      text: tree.map((node) => size(node.nbytes)),
      customdata: tree.map((node) => [
        plain(node.name || "all"), counted(node.num_tensors), plain(node.component), node.dtype, share(node.nbytes),
      ]),
      texttemplate: "%{label}<br>%{text}",
      hovertemplate: "<b>%{customdata[0]}</b><br>%{text}, %{customdata[4]}<br>%{customdata[1]}, mostly %{customdata[3]}, in %{customdata[2]}<extra></extra>",
      marker: {
        colors: tree.map((node, number) => (number ? inks.get(node[by]) || "#9c9c9c" : colour("--calm-back"))),
        line: { width: 1, color: colour("--card") }, pad: { t: 20, l: 2, r: 2, b: 2 }, cornerradius: 3,
      },
      textfont: { color: tree.map((_, number) => (number ? "#ffffff" : colour("--ink"))), size: 12.5 },
      pathbar: { thickness: 24, textfont: { size: 13 } },
      maxdepth: SMALL.matches || tree.length > 400 ? 3 : 4, tiling: { packing: "squarify", pad: 2 },
    }], { height: SMALL.matches ? 400 : 540, margin: { l: 0, r: 0, t: 26, b: 0 }, uniformtext: { minsize: 10, mode: "hide" } });
    fillKeys("sizes-keys", names.slice(0, 14).map((name) => [inks.get(name), brief(name, 60) + ", " + size(sums.get(name))]));
  }

  const spanOf = (column) => {
    const width = facts.ranks.ranks_per_column;
    const last = Math.min((column + 1) * width, facts.world_size) - 1;
    return width === 1 ? "rank " + column : "ranks " + column * width + " to " + last;
  };

  function drawHeat() {
    const where = place("heat");
    if (!where) return;
    const ranks = facts.ranks;
    const rows = [...ranks.components].reverse();
    const columns = ranks.totals.map((_, column) => column * ranks.ranks_per_column);
    const most = Math.max(...rows.map((row) => row.most_nbytes), 1);
    draw(where, [{
      type: "heatmap", x: columns, y: rows.map((_, number) => number),
      z: rows.map((row) => row.by_column), zmin: 0, zmax: most,
      text: rows.map((row) => row.by_column.map((nbytes, column) => plain(brief(row.name, 60)) + "<br>" + spanOf(column) + ": " + size(nbytes))),
      hovertemplate: "%{text}<extra></extra>",
      xgap: columns.length <= 128 ? 1 : 0, ygap: 2,
      colorscale: [[0, colour("--heat-0")], [0.5, colour("--heat-1")], [1, colour("--heat-2")]],
      colorbar: { ...sizeTicks(most), thickness: 10, outlinewidth: 0, len: 1, x: 1.01, xpad: 0 },
    }], {
      height: 96 + Math.max(rows.length, 2) * (SMALL.matches ? 30 : 34),
      xaxis: { showgrid: false, zeroline: false, title: { text: "rank", standoff: 6 }, tickformat: ",d", ...fewTicks(columns) },
      yaxis: { showgrid: false, zeroline: false, tickvals: rows.map((_, number) => number), ticktext: rows.map((row) => plain(brief(row.name, SMALL.matches ? 14 : 30))) },
    });
  }

  const fewTicks = (values) => (values.length <= 16 ? { tickvals: values } : {});

  function drawTotals() {
    const where = place("totals");
    if (!where) return;
    const ranks = facts.ranks;
    const columns = ranks.totals.map((_, column) => column * ranks.ranks_per_column);
    const ends = [columns[0] - 0.5, columns[columns.length - 1] + 0.5];
    draw(where, [
      {
        type: "bar", x: columns, y: ranks.totals, name: "stored", marker: { color: colour("--accent"), line: { width: 0 } },
        text: ranks.totals.map((nbytes, column) => spanOf(column) + ": " + size(nbytes)), textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
      },
      {
        type: "scatter", mode: "lines", x: ends, y: [ranks.mean_nbytes, ranks.mean_nbytes], hoverinfo: "skip",
        line: { color: colour("--warn"), width: 1.5, dash: "dot" },
      },
    ], {
      height: 220, bargap: columns.length <= 128 ? 0.25 : 0,
      xaxis: { showgrid: false, title: { text: "rank", standoff: 6 }, tickformat: ",d", ...fewTicks(columns) },
      yaxis: { rangemode: "tozero", ...sizeTicks(ranks.most_nbytes) },
    });
  }

  // --- a run ----------------------------------------------------------------------------------

  const withStep = () => facts.checkpoints.filter((one) => one.step !== null);
  const when = (at) => new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ");
  const numbers = (values) => values.map((value) => (typeof value === "number" ? value : Number(value)));
  const stepAxis = (more) => ({ title: { text: "step", standoff: 6 }, tickformat: ",d", ...more });

  function notes(one) {
    const told = [...one.protected_by];
    if (one.is_orphaned) told.push("orphaned");
    if (one.result === "damaged") told.push("damaged");
    return told.map((text) => "<br>" + plain(brief(text, 80))).join("");
  }

  const nameOf = (one) => "<b>step " + one.step.toLocaleString("en") + "</b>";

  function drawPhases() {
    const where = place("phases");
    if (!where) return;
    const timed = withStep().filter((one) => Object.keys(one.seconds).length);
    where.hidden = !timed.length;
    if (!timed.length) return;
    const inBackground = (one) => "stage" in one.seconds;
    const stalls = (one, phase) => !inBackground(one) || STALLING.includes(phase);
    const order = ["ready", "agree", "stage", "claim", "write", "clean up"];
    const rank = (phase) => (order.includes(phase) ? order.indexOf(phase) : order.length);
    const kinds = new Map();
    for (const one of timed) {
      for (const phase of Object.keys(one.seconds)) {
        const kind = (stalls(one, phase) ? "0" : "1") + phase;
        kinds.set(kind, [...(kinds.get(kind) || []), one]);
      }
    }
    const names = [...kinds.keys()].sort((a, b) => a[0].localeCompare(b[0]) || rank(a.slice(1)) - rank(b.slice(1)));
    const used = { 0: 0, 1: 0 };
    const labels = timed.map((one, number) => number);
    const traces = names.map((kind) => {
      const phase = kind.slice(1);
      const inks = kind[0] === "0" ? WARM : COOL;
      const ink = inks[used[kind[0]]++ % inks.length];
      const held = kinds.get(kind);
      return {
        type: "bar", name: phase + (kind[0] === "0" ? "" : " (beside the training)"), marker: { color: ink, line: { width: 0 } },
        x: labels, y: timed.map((one) => (held.includes(one) ? one.seconds[phase] : 0)), textposition: "none",
        text: timed.map((one) => nameOf(one) + "<br>" + plain(phase) + ": " + Number((one.seconds[phase] || 0).toPrecision(3)) + " s" +
          (one.slowest_rank === null ? "" : "<br>slowest: rank " + one.slowest_rank + (one.slowest_s === null ? "" : ", " + Number(one.slowest_s.toPrecision(3)) + " s"))),
        hovertemplate: "%{text}<extra></extra>",
      };
    });
    fillKeys("phases-keys", traces.map((trace) => [trace.marker.color, trace.name]));
    draw(where, traces, {
      barmode: "stack", height: 290, bargap: 0.3,
      xaxis: stepAxis({ showgrid: false, ...stepTicks(timed) }), yaxis: { rangemode: "tozero", ticksuffix: " s" },
    });
  }

  // A bar for each save, whatever lies between their steps.
  function stepTicks(found) {
    const every = Math.ceil(found.length / (SMALL.matches ? 5 : 12));
    const shown = found.map((one, number) => number).filter((number) => number % every === 0);
    return { tickvals: shown, ticktext: shown.map((number) => found[number].step.toLocaleString("en")) };
  }

  function marks(found, values) {
    const shapes = found.map((one, number) => {
      if (one.result === "damaged") return "x";
      if (one.is_orphaned) return "circle-open";
      const value = values && values[number];
      if (values && value === values.low) return "triangle-down";
      if (values && value === values.high) return "triangle-up";
      return "circle";
    });
    const inks = found.map((one) => (one.result === "damaged" ? colour("--bad") : one.is_orphaned ? colour("--soft")
      : one.protected_by.length ? colour("--good") : colour("--accent")));
    const sizes = found.map((one, number) => (one.protected_by.length || shapes[number].startsWith("triangle") || shapes[number] === "x" ? 11 : 7));
    return { symbol: shapes, color: inks, size: sizes, line: { width: 1.5, color: inks } };
  }

  function drawHistory() {
    const where = place("history");
    if (!where) return;
    const found = withStep().filter((one) => one.saved_at !== null);
    where.hidden = !found.length;
    if (!found.length) return;
    found.sort((a, b) => a.saved_at - b.saved_at);
    const incarnations = facts.incarnations.map((one) => ({
      type: "line", xref: "x", yref: "paper", x0: when(one.at), x1: when(one.at), y0: 0, y1: 1,
      line: { color: colour("--warn"), width: 1, dash: "dot" },
    }));
    draw(where, [{
      type: "scatter", mode: "lines+markers", x: found.map((one) => when(one.saved_at)), y: found.map((one) => one.step),
      line: { color: colour("--line"), width: 1.5 }, marker: marks(found),
      text: found.map((one) => nameOf(one) + "<br>" + when(one.saved_at) + " UTC<br>" + size(one.nbytes || 0) + notes(one)),
      hovertemplate: "%{text}<extra></extra>",
    }], {
      height: 280, shapes: incarnations,
      xaxis: { type: "date", title: { text: "UTC", standoff: 6 } }, yaxis: { title: { text: "step", standoff: 6 }, tickformat: ",d" },
    });
  }

  function drawMetric(where) {
    const metric = facts.metrics[Number(where.dataset.number)];
    const found = withStep().filter((one) => metric.name in one.metrics);
    const values = numbers(found.map((one) => one.metrics[metric.name]));
    const alive = values.filter((value, number) => !found[number].is_orphaned && Number.isFinite(value));
    values.low = Math.min(...alive);
    values.high = Math.max(...alive);
    const onLine = found.map((one, number) => (one.is_orphaned ? null : values[number]));
    const texts = found.map((one, number) => nameOf(one) + "<br>" + plain(brief(metric.name, 60)) + ": " + Number(values[number].toPrecision(6)) + notes(one));
    draw(where, [
      {
        type: "scatter", mode: "lines", x: found.map((one) => one.step), y: onLine, hoverinfo: "skip",
        line: { color: colour("--line"), width: 1.5 }, connectgaps: true,
      },
      {
        type: "scatter", mode: "markers", x: found.map((one) => one.step), y: values, marker: marks(found, values),
        text: texts, hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
      },
    ], { height: 240, xaxis: stepAxis(), yaxis: {} });
  }

  function drawSteps() {
    const where = place("steps");
    if (!where) return;
    const found = withStep().filter((one) => one.nbytes !== null);
    where.hidden = !found.length;
    if (!found.length) return;
    draw(where, [{
      type: "bar", x: found.map((_, number) => number), y: found.map((one) => one.nbytes), textposition: "none",
      marker: { color: marks(found).color, line: { width: 0 }, opacity: 0.85 },
      text: found.map((one) => nameOf(one) + "<br>" + size(one.nbytes) + ", " + one.num_tensors.toLocaleString("en") + " tensors" + notes(one)),
      hovertemplate: "%{text}<extra></extra>",
    }], {
      height: 240, bargap: 0.3,
      xaxis: stepAxis({ showgrid: false, ...stepTicks(found) }),
      yaxis: { rangemode: "tozero", ...sizeTicks(Math.max(...found.map((one) => one.nbytes))) },
    });
  }

  function drawAll() {
    drawSizes();
    drawHeat();
    drawTotals();
    drawPhases();
    drawHistory();
    document.querySelectorAll(".metric").forEach(drawMetric);
    drawSteps();
  }

  drawAll();
  document.querySelectorAll("fieldset.choice").forEach((choice) => {
    choice.hidden = false;
    choice.addEventListener("change", drawSizes);
  });
  DARK.addEventListener("change", drawAll);
  SMALL.addEventListener("change", drawAll);
  document.documentElement.dataset.drawn = "yes";
})();
