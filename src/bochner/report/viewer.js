"use strict";
// The head viewer: data and elements lie in one <section class="viewer">; errors are cells of the map beside it.
document.querySelectorAll("section.viewer").forEach((box) => {
  const data = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const n = data.tokens.length;
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const weights = { exact: bytes(data.exact), converted: bytes(data.converted) };
  const heads = data.layers.flatMap((layer, i) => Array.from({ length: data.heads[i] }, (_, h) => ({ layer: layer, head: h })));
  const select = box.querySelector("select");
  const cells = [...box.querySelectorAll(".cell")];
  let head = data.start, row = data.row;

  heads.forEach((h, i) => select.add(new Option(`layer ${h.layer}, head ${h.head}: error ${data.errors[i].toFixed(2)}`, i)));
  // Stored as square roots, so that small weights keep their digits.
  const weight = (kind, i, j) => (weights[kind][(head * n + i) * n + j] / 255) ** 2;

  function draw() {
    select.value = head;
    cells.forEach((c) => c.classList.toggle("on", Number(c.dataset.head) === head));
    const style = getComputedStyle(document.documentElement);
    const [cold, hot] = ["--cold", "--hot"].map((v) => style.getPropertyValue(v).split(",").map(Number));
    for (const kind of ["exact", "converted"]) {
      const panel = box.querySelector(`.${kind}`);
      const spans = panel.querySelectorAll(".tokens span");
      let top = 1e-9;
      for (let j = 0; j < n; j++) top = Math.max(top, weight("exact", row, j));
      spans.forEach((span, j) => {
        const w = weight(kind, row, j);
        span.style.background = `rgba(${hot.join(",")},${Math.min(1, Math.sqrt(w / top)) * 0.85})`;
        span.title = `${(100 * w).toFixed(1)} %`;
        span.classList.toggle("asked", j === row);
      });
      const canvas = panel.querySelector("canvas");
      canvas.width = canvas.height = n;
      const context = canvas.getContext("2d");
      const image = context.createImageData(n, n);
      for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
        const t = Math.min(1, weights[kind][(head * n + i) * n + j] / 180), p = 4 * (i * n + j);
        for (let c = 0; c < 3; c++) image.data[p + c] = cold[c] + t * (hot[c] - cold[c]);
        image.data[p + 3] = 255;
      }
      context.putImageData(image, 0, 0);
    }
    box.querySelector(".asked-for").textContent = data.tokens[row];
    box.dataset.head = head; box.dataset.row = row;
  }

  for (const kind of ["exact", "converted"]) {
    const panel = box.querySelector(`.${kind}`);
    const line = panel.querySelector(".tokens");
    data.tokens.forEach((token, j) => {
      const span = document.createElement("span");
      span.textContent = token;
      span.addEventListener("click", () => { row = j; draw(); });
      line.append(span, data.joined[j] ? "" : " ");
    });
    panel.querySelector("canvas").addEventListener("click", (event) => {
      row = Math.min(n - 1, Math.floor((event.offsetY / event.target.clientHeight) * n)); draw();
    });
  }
  select.addEventListener("change", () => { head = Number(select.value); draw(); });
  cells.forEach((c) => c.addEventListener("click", () => { head = Number(c.dataset.head); draw(); }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
});
