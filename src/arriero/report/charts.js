const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function draw(chart) {
  const figure = JSON.parse(chart.querySelector("script").textContent);
  for (const trace of figure.data) {
    const colour = tint(trace.tint);
    trace.line = { ...trace.line, color: colour };
    trace.marker = { size: 5, ...trace.marker, color: colour, line: { color: colour, width: 1.5 } };
  }
  const axis = { gridcolor: tint("grid"), linecolor: tint("line"), zeroline: false, automargin: true };
  const { xaxis, yaxis, ...rest } = figure.layout;
  const layout = {
    ...rest, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, uirevision: "kept",
    margin: { l: 64, r: 12, t: 8, b: 44 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: tint("dim"), size: 12 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tint("muted"), activecolor: tint("text") },
    hoverlabel: { bgcolor: tint("tip"), font: { color: tint("tip-text") } },
  };
  chart.drawn ??= chart.appendChild(Object.assign(document.createElement("div"), { style: "height:100%" }));
  Plotly.react(chart.drawn, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
}
const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
// fetch the page again and take over what changed; charts keep their zoom
async function refresh() {
  const answer = await fetch("?content").catch(() => null);
  if (!answer?.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
  const old = document.querySelector("main");
  const charts = old.querySelectorAll(".chart"), next = fresh.querySelectorAll(".chart");
  if (charts.length !== next.length || old.children.length !== fresh.children.length) { old.replaceWith(fresh); drawAll(); return; }
  charts.forEach((chart, i) => { chart.querySelector("script").textContent = next[i].querySelector("script").textContent; draw(chart); });
  [...old.children].forEach((part, i) => {
    const keeps = part.querySelector(".chart, details[open]");
    if (!keeps && part.innerHTML !== fresh.children[i].innerHTML) part.innerHTML = fresh.children[i].innerHTML;
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
