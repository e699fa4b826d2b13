// The search and the copy buttons of the site. Pages read without it. It is no module: browsers load none from a disk.
(() => {
"use strict";
const { root, index } = document.currentScript.dataset;
const box = document.querySelector(".search");
const input = document.getElementById("search");
const results = document.getElementById("results");
const MAX_RESULTS = 20, BEFORE = 60, EXCERPT = 180;

// Points of a term by where it is found. A heading has up to twice as many, by the share of its words that are asked for.
const IN_PAGE = 6, IN_HEADING = 7, IN_TEXT = 1, MAX_IN_TEXT = 5;
// The fewest letters of a term that counts for the share: "a" and "I" begin words of most headings.
const MIN_IN_SHARE = 3;

// Factors of the points of some pages: last come those for people who change Barchan, or of what it was; then references, then
// measurements. Tutorials and recipes are just behind the explanations, which have the factor 1.
const LESS = [[/^(adr\/|changelog|contributing|architecture)/, 0.2], [/^(rest|kinds|metrics)\./, 0.4], [/^(benchmarks|figures)/, 0.5], [/^(tutorial|recipes)/, 0.9]];

let loading;
// load fetches the index once, by a script element, which works on a disk as well.
function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = index;
    script.onload = () => resolve(globalThis.docsIndex);
    script.onerror = () => { loading = undefined; reject(new Error("the index cannot be loaded")); };
    document.head.append(script);
  });
  return loading;
}

// starts makes an expression for the words that begin with a term.
const starts = (term) => new RegExp("(?<![\\p{L}\\p{N}])" + term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");

const count = (text, term) => (text.match(term) ?? []).length;

// score returns the points of a section, and how many of the terms it has. Those in long count for the share of the heading.
function score(section, terms, long) {
  let sum = 0, has = 0;
  const words = section.h.match(/[\p{L}\p{N}]+/gu) ?? [];
  const share = words.filter((word) => long.some((term) => count(word, term))).length / Math.max(1, words.length);
  for (const term of terms) {
    const points = IN_PAGE * Math.min(count(section.p, term), 1) + IN_HEADING * (1 + share) * Math.min(count(section.h, term), 1)
      + IN_TEXT * Math.min(count(section.t, term), MAX_IN_TEXT);
    sum += points;
    if (points) has++;
  }
  return { points: sum * (LESS.find(([page]) => page.test(section.u))?.[1] ?? 1), has, section };
}

// marked shows the part of a text that begins before its first term, with the terms marked.
function marked(text, terms) {
  const at = Math.min(...terms.map((term) => text.search(term)).filter((i) => i >= 0), text.length);
  const from = at === text.length ? 0 : Math.max(0, at - BEFORE);
  const part = (from ? "…" : "") + text.slice(from, from + EXCERPT) + (from + EXCERPT < text.length ? "…" : "");
  const span = document.createElement("span");
  let done = 0;
  for (const hit of part.matchAll(new RegExp(terms.map((term) => term.source).join("|"), "giu"))) {
    const mark = document.createElement("mark");
    mark.textContent = hit[0];
    span.append(part.slice(done, hit.index), mark);
    done = hit.index + hit[0].length;
  }
  span.append(part.slice(done));
  return span;
}

function item(section, terms) {
  const li = document.createElement("li"), a = document.createElement("a"), b = document.createElement("b");
  a.href = root + section.u;
  b.append(marked(section.h === section.p ? section.p : section.p + " › " + section.h, terms));
  a.append(b, marked(section.t, terms));
  a.addEventListener("click", close);
  li.append(a);
  return li;
}

const note = (text) => Object.assign(document.createElement("li"), { className: "note", textContent: text });

function close() { results.hidden = true; }

async function search() {
  const query = input.value.trim();
  const asked = query.split(/\s+/).filter(Boolean);
  const terms = asked.map(starts), long = asked.filter((term) => term.length >= MIN_IN_SHARE).map(starts);
  if (!terms.length) return close();
  let shown;
  try {
    const found = (await load()).map((section) => score(section, terms, long)).filter(({ has }) => has > 0 && has >= terms.length / 2);
    found.sort((a, b) => b.has - a.has || b.points - a.points);
    const most = found[0]?.has; // those with all terms, or with as many as there are together
    shown = found.filter(({ has }) => has === most).slice(0, MAX_RESULTS).map(({ section }) => item(section, terms));
    if (most < terms.length) shown.unshift(note("No section has every word; these have most of them."));
  } catch (err) {
    shown = [note("Search failed: " + err.message)];
  }
  if (input.value.trim() !== query) return;
  results.replaceChildren(...(shown.length ? shown : [note("Nothing found.")]));
  results.hidden = false;
}

// move goes through the results by the arrow keys, from the field and back to it.
function move(event) {
  const stops = [input, ...results.querySelectorAll("a")];
  const at = stops.indexOf(document.activeElement);
  const next = stops[at + (event.key === "ArrowDown" ? 1 : -1)];
  if (at < 0 || !next || results.hidden) return;
  event.preventDefault();
  next.focus();
}

box.hidden = false;
input.addEventListener("input", search);
input.addEventListener("focus", () => { load().catch(() => {}); if (input.value) search(); });
box.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") move(event);
  if (event.key === "Enter" && event.target === input) results.querySelector("a")?.click();
  if (event.key === "Escape") { close(); input.blur(); }
});
document.addEventListener("click", (event) => { if (!box.contains(event.target)) close(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  event.preventDefault();
  input.focus();
  input.select();
});

// copy uses the selection where there is no clipboard: on pages of plain HTTP that are not this machine's.
async function copy(code) {
  if (navigator.clipboard) return navigator.clipboard.writeText(code.textContent.trimEnd());
  getSelection().selectAllChildren(code);
  if (!document.execCommand("copy")) throw new Error("the browser refused");
}

for (const block of document.querySelectorAll(".code")) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
  button.addEventListener("click", async () => {
    button.textContent = await copy(block.querySelector("code")).then(() => "Copied", () => "Failed");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}

// Tables, drawings and pictures that are wider than the screen scroll, for the keyboard too; others are no stop of the Tab key.
const scrollers = new ResizeObserver((all) => {
  for (const { target } of all) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const box of document.querySelectorAll("article table, .drawing, article p:has(> img)")) scrollers.observe(box);

if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".contents")?.removeAttribute("open");
})();
