"use strict";
(() => {
  const state = { view: {}, frame: {}, log: {}, hidden: new Set(), sort: {}, playing: {} };
  let payload = JSON.parse(document.getElementById("payload").textContent);
  const drawn = new Set();
  const touch = matchMedia("(pointer: coarse)");
  const config = {
    responsive: true, displaylogo: false, displayModeBar: touch.matches ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const make = (tag, attributes = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };
  const shell = (key) => document.getElementById(`panel-${key}`);
  const panelOf = (key) => payload.panels.find((panel) => panel.key === key);
  const clamp = (value, count) => Math.max(0, Math.min(value, count - 1));

  // -- how plots look ------------------------------------------------------------------------------------------------
  function template() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), tickcolor: colour("--line") };
    const font = { color: colour("--text"), family: getComputedStyle(document.body).fontFamily, size: 12 };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, xaxis: axis, yaxis: axis,
        margin: { l: 50, r: 14, t: 32, b: 42 },
        hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--muted"), font, align: "left" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
      },
    };
  }

  function logAxis(view) { // one range for all plots of a view
    const values = view.facets.flatMap((facet) => facet.frames.flat()).flatMap((trace) => trace.y).filter((value) => value > 0);
    const ends = [Math.log10(Math.min(...values)) - 0.05, Math.log10(Math.max(...values)) + 0.05];
    return { type: "log", range: ends, dtick: ends[1] - ends[0] < 3 ? "D2" : 1 };
  }

  function layoutOf(panel, facet, plot) {
    const layout = { ...facet.layout, template: template(), uirevision: `${panel.key}-${state.view[panel.key] || 0}-${state.log[panel.key]}` };
    if (state.log[panel.key]) layout.yaxis = { ...layout.yaxis, ...logAxis(panel.views[clamp(state.view[panel.key] || 0, panel.views.length)]) };
    layout.dragmode = touch.matches ? false : "zoom";
    if (document.documentElement.classList.contains("printing")) {
      layout.width = plot.parentElement.clientWidth;
      layout.height = Math.max(150, 0.7 * layout.height);
    }
    return layout;
  }

  const short = (value) => String(Number(value.toPrecision(4)));

  function cellTexts({ z, meta }) { // what each cell of a map says on hovering
    return z.map((row, i) => row.map((value, j) => {
      if (value === null) return "";
      const ends = meta.low && meta.low[i][j] !== null ? ` (${short(meta.low[i][j])} to ${short(meta.high[i][j])})` : "";
      return `${meta.y[i]}<br>${meta.x[j]}<br>${short(meta.log ? 10 ** value : value)}${ends}`;
    }));
  }

  const tracesOf = (facet, frame) => facet.frames[clamp(frame, facet.frames.length)].map((trace) => ({
    ...trace, visible: !state.hidden.has(trace.legendgroup), ...(trace.meta ? { hovertext: cellTexts(trace) } : {}),
  }));

  // -- panels --------------------------------------------------------------------------------------------------------
  function present() {
    payload.panels.forEach((panel) => {
      shell(panel.key).hidden = document.querySelector(`[data-link="${panel.key}"]`).hidden = !panel.views.length;
    });
  }

  function draw(key) {
    const panel = panelOf(key), place = shell(key);
    if (!panel.views.length) return;
    drawn.add(key);
    const view = panel.views[clamp(state.view[key] || 0, panel.views.length)];
    const frame = view.moments.length ? (state.frame[key] ?? view.moments.length - 1) : 0;
    words(panel, place, view);
    chooser(panel, place);
    legend(panel, place, view);
    slider(panel, place, view, frame);
    plots(panel, place, view, frame);
  }

  function words(panel, place, view) {
    const put = (selector, text) => {
      const element = place.querySelector(selector);
      element.textContent = text || "";
      element.hidden = !text;
    };
    put(".note", panel.note);
    put(".sentence", view.sentence);
    place.querySelector(".switch").hidden = !panel.log_switch;
    const formula = place.querySelector(".formula");
    formula.innerHTML = view.formula; // escaped where it was written
    formula.hidden = !formula.textContent;
    const rows = panel.table.rows.length;
    place.querySelector("details").hidden = place.querySelector(".csv").hidden = !rows;
    place.querySelector("summary").textContent = `Data, ${rows} ${rows === 1 ? "row" : "rows"}`;
    if (place.querySelector("details").open) preview(panel, place);
  }

  function chooser(panel, place) {
    const select = place.querySelector("select");
    const labels = panel.views.map((view) => view.label);
    if (labels.join("\n") !== [...select.options].map((option) => option.text).join("\n")) {
      select.replaceChildren(...labels.map((text, index) => new Option(text, index)));
    }
    select.value = clamp(state.view[panel.key] || 0, labels.length);
    place.querySelector(".choose").hidden = labels.length < 2;
  }

  function legend(panel, place, view) {
    const box = place.querySelector(".legend");
    const lines = view.facets.flatMap((facet) => facet.frames.flat()).map((trace) => trace.legendgroup);
    const names = new Set([...lines, ...view.facets.map((facet) => facet.name)].filter(Boolean));
    const shown = payload.settings.filter((setting) => names.has(setting.name));
    box.hidden = shown.length < 2;
    const labels = shown.map((setting) => setting.name + state.hidden.has(setting.name)).join("\n");
    if (box.dataset.labels === labels) return;
    const focused = [...box.children].indexOf(document.activeElement);
    box.dataset.labels = labels;
    box.replaceChildren(...shown.map((setting) => {
      const swatch = make("i", { hidden: !lines.includes(setting.name) }); // a setting may be a plot instead of a line
      swatch.style.borderTopStyle = { dash: "dashed", dot: "dotted" }[setting.dash] || "solid";
      swatch.style.borderTopColor = setting.colour;
      const button = make("button", { type: "button", className: "key", onclick: () => toggle(setting.name) }, swatch, setting.name);
      button.setAttribute("aria-pressed", !state.hidden.has(setting.name));
      return button;
    }));
    if (focused >= 0) box.children[focused]?.focus();
  }

  function slider(panel, place, view, frame) {
    const box = place.querySelector(".slider");
    const moments = view.moments;
    box.hidden = moments.length < 2;
    if (box.hidden) return;
    const input = box.querySelector("input");
    input.max = moments.length - 1;
    input.value = clamp(frame, moments.length);
    const moment = moments[input.value];
    box.querySelector("output").textContent = moment;
    input.setAttribute("aria-valuetext", moment);
  }

  function plots(panel, place, view, frame) {
    const box = place.querySelector(".plots");
    const facets = view.facets.filter((facet) => !state.hidden.has(facet.name));
    const titles = facets.map((facet) => facet.title).join("\n") + view.label;
    if (box.dataset.titles !== titles) {
      [...box.querySelectorAll(".plot")].forEach((plot) => Plotly.purge(plot));
      box.replaceChildren(...facets.map((facet) => {
        const plot = make("div", { className: "plot" });
        plot.setAttribute("role", "img");
        plot.setAttribute("aria-label", [panel.title, view.label, facet.title].filter(Boolean).join(", "));
        return make("figure", { className: "facet" }, ...(facet.title ? [make("figcaption", { textContent: facet.title })] : []), plot);
      }));
      box.dataset.titles = titles;
    }
    const places = box.querySelectorAll(".plot");
    facets.forEach((facet, index) => {
      Plotly.react(places[index], tracesOf(facet, frame), layoutOf(panel, facet, places[index]), config);
    });
  }

  const redraw = () => drawn.forEach(draw);

  function toggle(name) {
    if (!state.hidden.delete(name)) state.hidden.add(name);
    if (payload.settings.every((setting) => state.hidden.has(setting.name))) state.hidden.clear();
    redraw();
  }

  function play(key) {
    const button = shell(key).querySelector(".play");
    const stop = () => {
      clearInterval(state.playing[key]);
      delete state.playing[key];
      button.textContent = "▶";
      button.setAttribute("aria-label", "Play through training");
    };
    if (state.playing[key]) return stop();
    const last = () => panelOf(key).views[clamp(state.view[key] || 0, panelOf(key).views.length)].moments.length - 1;
    if ((state.frame[key] ?? last()) >= last()) state.frame[key] = -1;
    button.textContent = "❚❚";
    button.setAttribute("aria-label", "Stop");
    state.playing[key] = setInterval(() => {
      state.frame[key] += 1;
      draw(key);
      if (state.frame[key] >= last()) stop();
    }, 350);
  }

  // -- data as CSV and as a table ------------------------------------------------------------------------------------
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number" || typeof value === "boolean") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value; // a spreadsheet must not take a name for a formula
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function download(name, columns, rows) {
    const text = [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
    const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    make("a", { href: address, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  function preview(panel, place) {
    const most = 200, { columns, rows } = panel.table;
    const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col", textContent: name })));
    const body = rows.slice(0, most).map((row) => make("tr", {}, ...row.map((value) =>
      make("td", { className: typeof value === "number" ? "number" : "", textContent: value ?? "" }))));
    const parts = [make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))];
    if (rows.length > most) parts.push(make("p", { className: "note", textContent: `The first ${most} of ${rows.length} rows; the CSV has all.` }));
    place.querySelector("details .scroll").replaceChildren(...parts);
  }

  // -- tables one can sort -------------------------------------------------------------------------------------------
  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const value = (row) => row.cells[column]?.dataset.value ?? "";
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const numbers = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
      return direction * (numbers ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true }));
    };
    body.append(...[...body.rows].sort(compare));
    [...table.tHead.rows[0].cells].forEach((head, index) =>
      head.setAttribute("aria-sort", index === column ? (direction > 0 ? "ascending" : "descending") : "none"));
    state.sort[table.dataset.table] = [column, direction];
  }

  function restoreSorting() {
    document.querySelectorAll("table.sortable").forEach((table) => {
      const chosen = state.sort[table.dataset.table];
      if (chosen && chosen[0] < table.tHead.rows[0].cells.length) sort(table, ...chosen);
    });
  }

  // -- events --------------------------------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const panel = button.closest(".panel"), heading = button.closest("table.sortable th");
    if (heading) {
      sort(heading.closest("table"), heading.cellIndex, heading.getAttribute("aria-sort") === "ascending" ? -1 : 1);
    } else if (button.matches(".csv") && panel) {
      const { columns, rows } = panelOf(panel.dataset.key).table;
      download(panel.dataset.key, columns, rows);
    } else if (button.matches(".csv")) {
      const { columns, rows } = payload.tables[button.dataset.csv];
      download(button.dataset.csv, columns, rows);
    } else if (button.matches(".play")) {
      play(panel.dataset.key);
    }
  });
  document.addEventListener("change", (event) => {
    const panel = event.target.closest(".panel");
    if (!panel) return;
    const key = panel.dataset.key;
    if (event.target.matches("select")) state.view[key] = Number(event.target.value);
    if (event.target.matches(".switch input")) state.log[key] = event.target.checked;
    draw(key);
  });
  document.addEventListener("input", (event) => {
    const panel = event.target.closest(".panel");
    if (panel && event.target.matches("input[type=range]")) {
      state.frame[panel.dataset.key] = Number(event.target.value);
      draw(panel.dataset.key);
    }
  });
  document.addEventListener("toggle", (event) => {
    const panel = event.target.closest(".panel");
    if (panel && event.target.open) preview(panelOf(panel.dataset.key), panel);
  }, true);

  present();
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !drawn.has(entry.target.dataset.key)) draw(entry.target.dataset.key);
  }), { rootMargin: "600px" });
  document.querySelectorAll(".panel").forEach((panel) => watcher.observe(panel));

  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    payload.panels.forEach((panel) => draw(panel.key));
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    redraw();
    document.querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot));
  });

  // -- live ----------------------------------------------------------------------------------------------------------
  async function refresh() {
    const sign = document.getElementById("live");
    try {
      const answer = await fetch(`data.json?version=${encodeURIComponent(payload.version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        payload = await answer.json();
        document.getElementById("summary").innerHTML = payload.summary_html; // escaped by the template
        document.getElementById("tables").innerHTML = payload.tables_html;
        restoreSorting();
        present();
        redraw();
      } else if (answer.status !== 204) {
        throw new Error(`answer ${answer.status}`);
      }
      sign.textContent = payload.status === "running" ? "live, updating" : `live, ${payload.status}`;
    } catch {
      sign.textContent = "the server does not answer; showing what it sent last";
    }
    setTimeout(refresh, payload.interval);
  }
  if (payload.interval) setTimeout(refresh, payload.interval);
})();
