"use strict";
// Draws the figures with plotly: as many columns of subplots as fit, in the colours of the page. Sorts tables.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  function template() {
    const css = getComputedStyle(root), colour = (name) => css.getPropertyValue(name).trim();
    const [card, text, muted, line, soft] = ["--card", "--text", "--muted", "--line", "--soft"].map(colour);
    const axis = { gridcolor: colour("--grid"), linecolor: line, zerolinecolor: line, tickcolor: line, title: { standoff: 6 } };
    const font = { color: text, family: getComputedStyle(document.body).fontFamily, size: 12 };
    const control = { bgcolor: soft, bordercolor: line, font: { color: text } };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, xaxis: axis, yaxis: axis, hovermode: "closest",
      hoverlabel: { bgcolor: card, bordercolor: muted, font, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: colour("--accent") },
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" },
      updatemenudefaults: control,
      sliderdefaults: { ...control, activebgcolor: colour("--accent"), bgcolor: line },
    } };
  }

  function geometry(plot) { // rows and columns of subplots, and the height they need
    const { layout } = figures[plot.dataset.figure], { facets, width, height, legend } = layout.meta;
    const shared = facets > 1 && layout.yaxis2?.matches === "y", hidden = layout.yaxis?.visible === false;
    const longest = Math.max(0, ...(layout.yaxis?.categoryarray || []).map((name) => name.length));
    const left = hidden ? 8 : Math.max(52, Math.min(190, 14 + 6.6 * longest)), right = layout.coloraxis ? 78 : 14;
    const names = layout.xaxis?.tickangle === 0 ? [] : layout.xaxis?.categoryarray || [], widest = Math.max(0, ...names.map((name) => name.length));
    const room = (plot.clientWidth || 600) - left - right, beside = hidden ? 12 : shared ? 26 : 62;
    const columns = Math.max(1, Math.min(facets, layout.meta.most, Math.floor((room + beside) / (width + beside)))), rows = Math.ceil(facets / columns);
    const turned = names.length * widest * 7 > room / columns ? Math.min(130, 6.5 * widest) : 0, below = (hidden ? 42 : 68) + turned;
    const entry = 46 + 6.6 * Math.max(0, ...legend.map((name) => name.length)); // plotly gives each entry the widest one's room
    const lines = legend.length > 1 ? Math.ceil(legend.length / Math.max(1, Math.floor((room + left) / entry))) : 0;
    const margin = {
      l: left, r: right, t: layout.updatemenus.some((menu) => menu.y === 1) ? 74 : hidden ? 44 : 30, b: (hidden ? 6 : 46 + turned) + (lines && 8) + 24 * lines + (layout.sliders.length ? 72 : 0),
    };
    const found = {
      height: rows * (height + below) - below + margin.t + margin.b, margin,
      grid: { rows, columns, pattern: "independent", xgap: beside / ((room + beside) / columns), ygap: below / (height + below) },
    };
    for (let i = 0; shared && i < facets; i++) found[`yaxis${i ? i + 1 : ""}.showticklabels`] = i % columns === 0;
    return found;
  }

  function draw(plot) {
    const { data, layout, frames } = structuredClone(figures[plot.dataset.figure]);
    const { height, margin, grid, ...labels } = geometry(plot);
    Object.entries(labels).forEach(([path, shown]) => { (layout[path.split(".")[0]] ??= {}).showticklabels = shown; });
    Plotly.newPlot(plot, { data, layout: { ...layout, height, margin, grid, template: template(), dragmode: touch ? false : "zoom" }, frames, config });
  }

  function fit(plot) {
    const found = geometry(plot);
    plot.style.height = `${found.height}px`;
    if (plot.data) Plotly.relayout(plot, { ...found, width: plot.clientWidth });
  }
  const recolour = () => plots.filter((plot) => plot.data).forEach((plot) => Plotly.relayout(plot, { template: template() }));

  plots.forEach(fit); // before anything is drawn, so that links land where they point
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !entry.target.data) draw(entry.target);
  }), { rootMargin: "800px" });
  plots.forEach((plot) => watcher.observe(plot));
  addEventListener("resize", () => plots.forEach(fit));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    plots.forEach(fit);
    plots.forEach(draw);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    plots.forEach(fit);
    recolour();
  });

  document.addEventListener("click", (event) => {
    const head = event.target.closest("table.sortable th");
    if (!head) return;
    const body = head.closest("table").tBodies[0], value = (row) => row.cells[head.cellIndex].dataset.value;
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    body.append(...[...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return direction * (Number(x) - Number(y) || x.localeCompare(y, undefined, { numeric: true }));
    }));
    [...head.parentElement.cells].forEach((cell) => cell.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  });
})();
