// The search and the copy buttons of the site. Pages read without it. It is no module: browsers load none from a disk.
(() => {
"use strict";
const { root, index } = document.currentScript.dataset;
const box = document.querySelector(".search");
const input = document.getElementById("search");
const results = document.getElementById("results");
const MAX_RESULTS = 20, BEFORE = 60, EXCERPT = 180;

// The rank of a section is that of Okapi BM25 with fields (Robertson and others, "Simple BM25 extension to multiple weighted
// fields", 2004): a term counts more the fewer sections have it.
const IN_PAGE = 3, IN_HEADING = 5, SATURATION = 1.2, BY_LENGTH = 0.4;
// The least share of the weight of all terms that a section must have, and that of the best one below which a note says so.
const LEAST = 0.4, MOST = 0.75;
// Words of a question that say nothing of what is asked for, unless there is no other.
const STOP = new Set("a about an and are as at be by can could did do does for from get give has have how i if in into is it its me my not of on or our see should so such that the their then there these they this to was were what when where which while who why will with would you your".split(" "));
// The fewest letters that are left of a word without its ending.
const STEM = 4;

// Factors of the rank of some pages: last come those for people who change Barchan, or of what it was; then references, then
// measurements. Tutorials and recipes are just behind the explanations, which have the factor 1.
const LESS = [[/^(adr\/|changelog|contributing|architecture)/, 0.2], [/^(rest|kinds|metrics)\./, 0.4], [/^cli\./, 0.7], [/^(benchmarks|figures)/, 0.5], [/^(tutorial|recipes)/, 0.9]];

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

// termsOf makes expressions for the words that begin with one of the query; a word of several forms is asked for without its ending.
function termsOf(query) {
  const words = query.split(/\s+/).map((word) => word.replace(/^[^\p{L}\p{N}/-]+|[^\p{L}\p{N}]+$/gu, "")).filter(Boolean).map((word) => word.toLowerCase());
  const telling = words.filter((word) => !STOP.has(word));
  return [...new Set((telling.length ? telling : words).map((word) => word.replace(/(?<=..)(ing|ed|es|s|e)$/, (end, _, at) => at < STEM ? end : "")))]
    .map((word) => new RegExp("(?<![\\p{L}\\p{N}])" + word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu"));
}

const count = (text, term) => (text.match(term) ?? []).length;

// rank returns the sections for terms, the best first, each with the share of the weight of all terms that it has.
function rank(sections, terms) {
  const average = sections.reduce((sum, { t }) => sum + t.length, 0) / sections.length;
  const hits = sections.map(({ p, h, t }) => terms.map((term) => {
    const long = 1 - BY_LENGTH + BY_LENGTH * t.length / average;
    return IN_PAGE * Math.min(count(p, term), 1) + IN_HEADING * Math.min(count(h, term), 1) + count(t, term) / long;
  }));
  const weights = terms.map((_, i) => {
    const having = hits.filter((of) => of[i]).length;
    return Math.log(1 + (sections.length - having + 0.5) / (having + 0.5));
  });
  const whole = weights.reduce((sum, weight) => sum + weight, 0);
  return sections.map((section, n) => {
    let points = 0, share = 0;
    hits[n].forEach((hit, i) => {
      points += weights[i] * hit / (SATURATION + hit);
      if (hit) share += weights[i] / whole;
    });
    return { section, share, points: points * share * (LESS.find(([page]) => page.test(section.u))?.[1] ?? 1) };
  }).filter(({ share }) => share >= LEAST).sort((a, b) => b.points - a.points);
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
  const terms = termsOf(query);
  if (!terms.length) return close();
  let shown;
  try {
    const found = rank(await load(), terms).slice(0, MAX_RESULTS);
    shown = found.map(({ section }) => item(section, terms));
    if (found.length && found.every(({ share }) => share < MOST)) shown.unshift(note("No section has all of it; these have most."));
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
