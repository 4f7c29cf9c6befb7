// Draws the charts of .frontier: a choice of the chart, points with names, and what the point under the pointer says.
for (const box of document.querySelectorAll(".frontier")) {
  const charts = JSON.parse(box.querySelector("script").textContent);
  const choice = document.createElement("select"), view = document.createElement("div"), told = document.createElement("p");
  choice.setAttribute("aria-label", "chart");
  charts.forEach((c, i) => choice.add(new Option(c.title, i)));
  box.append(choice, view, told);
  const W = 640, H = 360, L = 64, R = 16, T = 16, B = 48;
  const ticks = (low, high) => {
    const step = [1, 2, 5, 10].map(f => f * 10 ** Math.floor(Math.log10((high - low) / 4))).find(s => (high - low) / s <= 6);
    const found = [];
    for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) found.push(+v.toPrecision(6));
    return found;
  };
  const draw = () => {
    const { x, y, points } = charts[choice.value];
    const axis = (values, start, end) => {  // logarithmic where the largest is more than ten times the smallest
      const log = Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
      const f = log ? Math.log10 : v => v, all = values.map(f), pad = (Math.max(...all) - Math.min(...all)) * .08 || 1;
      const low = Math.min(...all) - pad, high = Math.max(...all) + pad;
      const marks = log
        ? [-3, -2, -1, 0, 1, 2, 3].flatMap(p => [1, 2, 5].map(m => +(m * 10 ** p).toPrecision(2))).filter(v => f(v) >= low && f(v) <= high)
        : ticks(low, high);
      return { at: v => start + (f(v) - low) / (high - low) * (end - start), marks };
    };
    const across = axis(points.map(p => p[1]), L, W - R), up = axis(points.map(p => p[2]), H - B, T), X = across.at, Y = up.at;
    const best = points.filter(p => !points.some(q => q !== p && q[1] <= p[1] && q[2] <= p[2]));
    const g = [];
    for (const v of across.marks) g.push(`<line x1="${X(v)}" x2="${X(v)}" y1="${T}" y2="${H - B}"/><text x="${X(v)}" y="${H - B + 18}" text-anchor="middle">${v}</text>`);
    for (const v of up.marks) g.push(`<line x1="${L}" x2="${W - R}" y1="${Y(v)}" y2="${Y(v)}"/><text x="${L - 6}" y="${Y(v) + 4}" text-anchor="end">${v}</text>`);
    points.forEach((p, i) => g.push(`<circle class="${best.includes(p) ? "best" : ""}" cx="${X(p[1])}" cy="${Y(p[2])}" r="7" tabindex="0" data-i="${i}"><title>${p[0]}</title></circle>`));
    view.innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${charts[choice.value].title}">${g.join("")}<text x="${(L + W) / 2}" y="${H - 8}" text-anchor="middle">${x}</text><text transform="translate(14 ${(H - B) / 2}) rotate(-90)" text-anchor="middle">${y}</text></svg>`;
    const tell = i => { const p = points[i]; told.textContent = `${p[0]}: ${+p[1].toPrecision(3)} ${x}, ${+p[2].toPrecision(4)} ${y}`; };
    for (const c of view.querySelectorAll("circle")) for (const e of ["pointerenter", "focus", "click"]) c.addEventListener(e, () => tell(c.dataset.i));
    tell(points.indexOf(best[0]));
  };
  choice.addEventListener("change", draw);
  draw();
}
