"use strict";
// Draws the plot from the page's data block. Text only ever comes from there, already escaped for plotly.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("plot");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  // Okabe and Ito's colours, told apart by most colour-blind readers; dashes and end labels tell them apart without.
  const palettes = {
    light: { ink: "#1c1f24", quiet: "#5c636e", grid: "#e3e5e9", lines: ["#5c636e", "#0072b2", "#c4450c", "#00795a", "#a5447a", "#8a6d00"] },
    dark: { ink: "#e8eaed", quiet: "#a1a8b3", grid: "#343942", lines: ["#a1a8b3", "#56b4e9", "#ff8a50", "#4fd0a5", "#e29ac4", "#f0d35b"] },
  };

  function steps(times) {
    const x = [0], y = [0];
    times.forEach(function (t, i) { x.push(t); y.push(i + 1); });
    return [x, y];
  }

  function traces(palette) {
    const out = [];
    data.series.forEach(function (series, index) {
      const colour = palette.lines[index % palette.lines.length];
      const x = [], y = [];
      series.others.forEach(function (times) {
        const [tx, ty] = steps(times);
        x.push(...tx, null);
        y.push(...ty, null);
      });
      if (x.length) {
        out.push({ x: x, y: y, mode: "lines", line: { shape: "hv", width: 1, color: colour }, opacity: 0.22,
          legendgroup: series.name, showlegend: false, hoverinfo: "skip" });
      }
      const [tx, ty] = steps(series.typical);
      out.push({ x: tx, y: ty, name: series.name, mode: "lines", legendgroup: series.name,
        line: { shape: "hv", width: 2.6, color: colour, dash: series.dash },
        hovertemplate: "%{y} events after %{x:.1f} ms<extra>" + series.name + "</extra>" });
    });
    return out;
  }

  function layout(palette) {
    const axis = { gridcolor: palette.grid, zeroline: false, linecolor: palette.grid, ticks: "outside", tickcolor: palette.grid, rangemode: "tozero", automargin: true };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: palette.ink, size: 13, family: "system-ui, sans-serif" },
      margin: { l: 50, r: 12, t: 8, b: 44 },
      xaxis: Object.assign({ title: { text: "ms since the request was sent" } }, axis),
      yaxis: Object.assign({ title: { text: "events received" } }, axis),
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: palette.quiet, activecolor: palette.ink },
    };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: window.innerWidth > 700 ? "hover" : false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  };
  function draw(palette) { Plotly.react(place, traces(palette), layout(palette), config); }
  function current() { draw(dark.matches ? palettes.dark : palettes.light); }
  current();
  dark.addEventListener("change", current);
  window.addEventListener("beforeprint", function () { draw(palettes.light); });
  window.addEventListener("afterprint", current);
})();
