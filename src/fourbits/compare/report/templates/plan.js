"use strict";
const grid = JSON.parse(document.getElementById("grid").textContent);
const at = (id) => document.getElementById(id);
const digits = (value, most) => value.toLocaleString("en-US", { maximumFractionDigits: most, minimumFractionDigits: most });
const count = (value) => digits(value, 0);
/* Small values in two digits, so that little is not shown as 0. */
const small = (value, most) => (value >= 10 ** -most || value === 0 ? digits(value, most) : Number(value.toPrecision(2)).toString());
const gib = (bytes) => small(bytes / 2 ** 30, 1);
const money = (value) => value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 6 });
const energy = (value) => (value >= 10 ? count(value) : Number(value.toPrecision(2)).toString());

/* "42 s", "3 h", "12 days": as number_format.long_duration writes it. */
function duration(seconds) {
  for (const [unit, name] of [[365.25 * 86400, "years"], [86400, "days"], [3600, "h"], [60, "min"]])
    if (seconds >= 1.5 * unit) return (seconds / unit).toFixed(seconds < 10 * unit ? 1 : 0) + " " + name;
  return (seconds >= 9.95 ? seconds.toFixed(0) : Number(seconds.toPrecision(2)).toString()) + " s";
}

const cost = (cell, price, kwh) => cell.gpu_hours * price + cell.megawatt_hours * 1000 * kwh;

/* Prices are exact; a slider shows them on a scale that grows where one lies beyond its end. */
const prices = {};
function setPrice(id, value) {
  if (value > Number(at(id).max)) at(id).max = 2 * value;
  at(id).value = value;
  prices[id] = value;
}

function chosen() {
  return {
    recipe: document.querySelector("input[name=recipe]:checked").value,
    length: grid.lengths[at("length").value],
    gpus: grid.gpus[at("gpus").value],
    ...prices,
  };
}

function bars(list, parts, whole, format) {
  const rows = parts.filter(([, value]) => value / whole >= 0.002);
  const longest = Math.max(...rows.map(([, value]) => value));
  list.replaceChildren();
  for (const [name, value] of [...rows, ["all", whole]]) {
    const [term, bar, text] = ["dt", "dd", "dd"].map((tag) => list.appendChild(document.createElement(tag)));
    term.textContent = name;
    text.textContent = format(value);
    text.className = name === "all" ? "value sum" : "value";
    if (name === "all") { term.className = "sum"; continue; }
    const line = bar.appendChild(document.createElement("span"));
    line.className = "bar";
    line.style.width = (100 * value / longest).toFixed(1) + "%";
  }
}

function pairs(list, rows) {
  list.replaceChildren();
  for (const row of rows)
    ["dt", "dd"].forEach((tag, index) => { list.appendChild(document.createElement(tag)).textContent = row[index]; });
}

function fillTable(body, rows) {
  body.replaceChildren();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text, index) => {
      const found = line.insertCell();
      found.textContent = text;
      if (index < 2) found.className = "text";
    });
  }
}

function fillRow(row, cell, { price, kwh }) {
  const texts = cell === null
    ? ["does not fit", "", "", "", "", "", "", "", "", ""]
    : [duration(cell.seconds), count(cell.tokens_per_second), count(cell.per_gpu),
      cell.of_bf16 === null ? "" : digits(cell.of_bf16, 2) + "x", digits(100 * cell.mfu, 1) + " %",
      gib(cell.memory_bytes), energy(cell.megawatt_hours), price || kwh ? count(cost(cell, price, kwh)) : "\u2013",
      cell.units, cell.layout_text + (cell.cannot_run === null ? "" : ", not possible today")];
  texts.forEach((text, index) => { row.cells[index + 1].textContent = text; });
}

function show() {
  const now = chosen();
  at("gpus-value").textContent = count(now.gpus);
  at("length-value").textContent = count(now.length);
  at("price-value").textContent = money(now.price);
  at("kwh-value").textContent = money(now.kwh);
  const of = (recipe) => grid.cells[[recipe, now.length, now.gpus].join("/")];
  for (const row of at("recipes").rows) {
    fillRow(row, of(row.dataset.recipe), now);
    row.className = row.dataset.recipe === now.recipe ? "chosen" : "";
  }
  const cell = of(now.recipe);
  const where = count(now.gpus) + (now.gpus === 1 ? " GPU" : " GPUs");
  for (const id of ["layout", "checkpoints", "memory", "step", "alternatives"]) at(id).replaceChildren();
  if (cell === null) {
    at("headline").textContent = "Does not fit on " + where;
    at("summary").textContent = "No layout of this run in " + now.recipe + " fits their memory, tensor parallelism included.";
    at("refused").textContent = "";
  } else {
    const paid = now.price || now.kwh ? ", for " + count(cost(cell, now.price, now.kwh)) : "";
    at("headline").textContent = duration(cell.seconds) + " on " + where + paid;
    at("summary").textContent = count(cell.tokens_per_second) + " tokens/s in " + now.recipe +
      (cell.units ? " (" + cell.units + ")" : "") + ", " + gib(cell.memory_bytes) + " GiB per GPU.";
    at("refused").textContent = cell.cannot_run === null ? "" : "Not possible today: " + cell.cannot_run + ".";
    pairs(at("layout"), cell.layout);
    pairs(at("checkpoints"), cell.checkpoints);
    bars(at("memory"), cell.memory, cell.memory_bytes, (value) => gib(value) + " GiB");
    bars(at("step"), cell.step, cell.step_seconds, (value) => small(1000 * value, 1) + " ms");
    fillTable(at("alternatives"), cell.alternatives);
  }
  const state = new URLSearchParams(now);
  history.replaceState(null, "", "#" + state);
}

function start() {
  const state = new URLSearchParams(location.hash.slice(1));
  const [recipe, length, gpus] = grid.start.split("/");
  const index = (values, name, otherwise) => {
    const found = values.indexOf(Number(state.get(name) ?? otherwise));
    return found >= 0 ? found : values.indexOf(Number(otherwise));
  };
  at("gpus").max = grid.gpus.length - 1;
  at("length").max = grid.lengths.length - 1;
  at("gpus").value = index(grid.gpus, "gpus", gpus);
  at("length").value = index(grid.lengths, "length", length);
  ["price", "kwh"].forEach((id, place) => {
    const given = Number(state.get(id) ?? NaN);
    setPrice(id, given >= 0 && given < Infinity ? given : grid.prices[place]);
    at(id).addEventListener("input", () => { prices[id] = Number(at(id).value); });
  });
  const wanted = grid.recipes.includes(state.get("recipe")) ? state.get("recipe") : recipe;
  document.querySelector('input[name=recipe][value="' + CSS.escape(wanted) + '"]').checked = true;
  at("controls").addEventListener("input", show);
  show();
}

start();
