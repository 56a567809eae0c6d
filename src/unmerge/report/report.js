"use strict";
(() => {
  const byId = (name) => document.getElementById(name);

  // The slider: values at alpha, measured or between the two nearest measurements.
  const slider = byId("alpha");
  if (slider) {
    const points = JSON.parse(byId("points").textContent);
    const chosen = byId("explorer").dataset.chosen;
    const step = Number(slider.step);
    const first = points[0][0], last = points[points.length - 1][0];
    const percent = (share) => share === null ? "–" : (100 * share).toFixed(1) + "\u202f%";
    const short = (value) => String(Number(value.toFixed(4)));

    const between = (series, alpha) => {
      const known = points.filter((point) => point[series] !== null);
      const exact = known.find((point) => point[0] === alpha);
      if (exact) return { value: exact[series], measured: true };
      const above = known.findIndex((point) => point[0] > alpha);
      if (above < 1) return { value: null, measured: false };
      const [low, high] = [known[above - 1], known[above]];
      const share = (alpha - low[0]) / (high[0] - low[0]);
      return { value: low[series] + share * (high[series] - low[series]), measured: false, low: low[0], high: high[0] };
    };

    const cursors = [...document.querySelectorAll("#explorer svg")].map((svg) => {
      const [x0, x1, y0, y1] = svg.dataset.corners.split(" ").map(Number);
      return { x0, x1, y0, y1, group: svg.querySelector(".cursor") };
    });

    const place = (node, x, y) => {
      node.toggleAttribute("hidden", y === null);
      if (y !== null) node.setAttribute("transform", `translate(${x} ${y})`);
    };

    const show = () => {
      // A stop of the slider that is next to a measurement means that measurement.
      let alpha = Number(slider.value);
      const near = points.find((point) => Math.abs(point[0] - alpha) <= 0.5001 * step);
      if (near) alpha = near[0];
      const forget = between(1, alpha), retain = between(2, alpha);
      const kind = forget.measured ? "measured" : `interpolated, ${short(forget.low)} to ${short(forget.high)}`;
      byId("at-alpha").textContent = short(alpha);
      byId("at-forget").textContent = (forget.measured ? "" : "≈ ") + percent(forget.value);
      byId("at-retain").textContent =
        retain.value === null ? "not measured" : (retain.measured ? "" : "≈ ") + percent(retain.value);
      byId("at-kind").textContent = kind;
      byId("at-kind").classList.toggle("between", !forget.measured);
      slider.setAttribute(
        "aria-valuetext",
        `alpha ${short(alpha)}, forget ${percent(forget.value)}, retain ${percent(retain.value)}, ${kind}`);
      for (const { x0, x1, y0, y1, group } of cursors) {
        const x = x0 + (alpha - first) / (last - first) * (x1 - x0);
        const y = (value) => value === null ? null : y0 + value * (y1 - y0);
        group.removeAttribute("hidden");
        const line = group.querySelector("line");
        for (const [name, value] of [["x1", x], ["x2", x], ["y1", y0], ["y2", y1]]) line.setAttribute(name, value);
        place(group.querySelector(".forget"), x, y(forget.value));
        place(group.querySelector(".retain"), x, y(retain.value));
      }
    };
    slider.addEventListener("input", show);
    const back = byId("to-chosen");
    if (back) back.addEventListener("click", () => { slider.value = chosen; show(); });
    show();
  }

  // The copy button; without a clipboard the command is selected, ready to be copied by hand.
  const copy = byId("copy");
  if (copy) {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      const command = byId("command");
      getSelection().selectAllChildren(command);
      let done = false;
      try {
        await navigator.clipboard.writeText(command.textContent);
        done = true;
      } catch {
        done = document.execCommand("copy");
      }
      copy.textContent = done ? "Copied" : "Selected";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
  }

  // On paper nothing can be unfolded: measured values are opened, and closed again.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.unfold:not([open])")];
    for (const part of opened) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of opened) part.open = false; });
})();
