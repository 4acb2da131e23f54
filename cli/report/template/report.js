"use strict";
// What the page adds where scripts run: the values of every chart at the step that is pointed at, and sliders.
const { steps: [first, last], lines } = JSON.parse(document.getElementById("data").textContent);
const charts = [...document.querySelectorAll(".field")].map((field) => {
  const figure = field.closest("figure");
  const rule = field.appendChild(Object.assign(document.createElement("div"), { className: "rule", hidden: true }));
  const values = [...figure.querySelectorAll("[data-line]")].map((place) => ({ place, latest: place.textContent, dots: place.closest(".dots"), line: lines[field.dataset.chart][place.dataset.line] }));
  return { field, rule, values, at: figure.querySelector(".at") };
});
let current = last;

function nearest(xs, step) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - xs[low - 1] < xs[low] - step ? low - 1 : low;
}

function written(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  const [size, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return (value / size).toLocaleString("en-GB", { maximumSignificantDigits: 4 }) + letter;
}

function show(step) {
  current = Math.min(last, Math.max(first, Math.round(step)));
  for (const { rule, values, at } of charts) {
    rule.hidden = false;
    rule.style.left = `${last > first ? (100 * (current - first)) / (last - first) : 50}%`;
    at.textContent = `step ${current.toLocaleString("en-GB")}`;
    for (const { place, dots, line: [xs, ys] } of values) {
      const index = nearest(xs, current);
      place.textContent = written(ys[dots && xs[index] > current ? index - 1 : index]); // no evaluation to come
    }
  }
}

function rest() {
  for (const { rule, values, at } of charts) {
    rule.hidden = true;
    at.textContent = "";
    for (const { place, latest } of values) place.textContent = latest;
  }
}

for (const { field } of charts) {
  const point = (event) => {
    const box = field.getBoundingClientRect();
    show(first + ((event.clientX - box.left) / box.width) * (last - first));
  };
  field.tabIndex = 0;
  field.addEventListener("pointermove", point);
  field.addEventListener("pointerdown", point);
  field.addEventListener("pointerleave", rest);
  field.addEventListener("blur", rest);
  field.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    show(current + way * (event.shiftKey ? 10 : 1));
  });
}

document.documentElement.classList.add("js");
for (const strip of document.querySelectorAll(".strip")) {
  const frames = [...strip.querySelectorAll(".frame")];
  const slide = strip.querySelector(".slide");
  const [earlier, later] = slide.querySelectorAll("button");
  const range = slide.querySelector("input");
  const turn = (index) => {
    range.value = index;
    frames.forEach((frame, place) => frame.classList.toggle("current", place === Number(range.value)));
    range.setAttribute("aria-valuetext", frames[range.value].querySelector("h4").textContent.trim());
  };
  slide.hidden = frames.length < 2;
  range.addEventListener("input", () => turn(range.value));
  earlier.addEventListener("click", () => turn(Number(range.value) - 1));
  later.addEventListener("click", () => turn(Number(range.value) + 1));
  turn(frames.length - 1);
}
