// What all pages share: requests, the watch of sandboxes, the address, formats and small parts.
import { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback } from './vendor/preact.js';
export { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback };

/** An error that the server has answered. */
export class Refusal extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

let signedOut = () => {};
export const onSignedOut = (f) => { signedOut = f; };

/**
 * A fetch that is repeated twice where that changes nothing more, or signs in or out: a browser gives up a request when an address of its machine
 * changes, as on another network.
 * @param {string} path below /ui/api/
 * @param {RequestInit} init
 */
async function answerOf(path, init) {
  for (let left = init.method === 'GET' || path === 'session' ? 2 : 0; ; left--) {
    try {
      return await fetch('/ui/api/' + path, init);
    } catch (e) {
      if (init.signal?.aborted) throw e;
      if (left === 0) throw new Refusal(0, 'The server does not answer.');
      await new Promise((later) => setTimeout(later, 300));
    }
  }
}

/**
 * One request. What the page does by itself is marked by background, so that it does not keep an idle session.
 * @param {string} path below /ui/api/
 * @param {{method?: string, body?: any, raw?: BodyInit, background?: boolean, signal?: AbortSignal}} [o]
 */
export async function request(path, o = {}) {
  const headers = { 'X-Barchan-UI': o.background ? '0' : '1' };
  if (o.body !== undefined) headers['Content-Type'] = 'application/json';
  const answer = await answerOf(path, {
    method: o.method ?? (o.body === undefined && o.raw === undefined ? 'GET' : 'POST'),
    headers, body: o.raw ?? (o.body === undefined ? undefined : JSON.stringify(o.body)), signal: o.signal, credentials: 'same-origin',
  });
  if (answer.ok) return answer;
  let message = answer.statusText || 'The server answered ' + answer.status;
  try { message = (await answer.json()).message ?? message; } catch { /* no JSON */ }
  if (answer.status === 401 && path !== 'session') signedOut();
  throw new Refusal(answer.status, message);
}

/**
 * What a route answers: those of the REST API by the OpenAPI document, others are not known.
 * @template {string} M @template {string} P
 * @typedef {P extends `rest/${infer R}` ? import('./api').Answer<`${M} ${R}`> : any} Answer
 */

/**
 * @template {string} P
 * @param {P} path
 * @param {{background?: boolean, signal?: AbortSignal}} [o]
 * @returns {Promise<Answer<'GET', P>>}
 */
export async function get(path, o) { return (await request(path, o)).json(); }

/**
 * @template {string} M @template {string} P
 * @param {M} method
 * @param {P} path
 * @param {P extends `rest/${infer R}` ? import('./api').Body<`${M} ${R}`> : any} [body]
 * @param {object} [o]
 * @returns {Promise<Answer<M, P>>}
 */
export async function send(method, path, body, o) {
  const answer = await request(path, { ...o, method, body });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

/** Calls each with every line of JSON of an endless answer, until it ends or signal aborts it. */
export async function stream(path, each, signal) {
  const answer = await request(path, { background: true, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) if (line) each(JSON.parse(line));
  }
}

/** The sandboxes of the namespace as the server's watch shows them. */
export const store = {
  rows: new Map(), version: 0, synced: false, connected: false, error: '', at: 0, listeners: new Set(), stop: null,
  change() {
    this.version++;
    if (this.pending) return;
    this.pending = true;
    const tell = () => { this.pending = false; for (const f of this.listeners) f(this.version); };
    if (document.hidden) setTimeout(tell, 250); else requestAnimationFrame(tell);
  },
  start() {
    if (this.stop) return;
    const abort = new AbortController();
    this.stop = () => { abort.abort(); this.stop = null; this.rows = new Map(); this.synced = this.connected = false; this.change(); };
    this.follow(abort.signal);
  },
  async follow(signal) {
    for (let wait = 250; !signal.aborted; wait = Math.min(wait * 2, 10000)) {
      const seen = new Set();
      let synced = false;
      try {
        await stream('watch', (m) => {
          wait = 250;
          this.connected = true; this.error = ''; this.at = Date.parse(m.at);
          for (const r of m.rows ?? []) { this.rows.set(r.id, r); if (!synced) seen.add(r.id); }
          for (const id of m.gone ?? []) this.rows.delete(id);
          if (m.synced) {
            synced = this.synced = true;
            for (const id of this.rows.keys()) if (!seen.has(id)) this.rows.delete(id); // they went while the stream was cut
          }
          this.change();
        }, signal);
      } catch (e) {
        if (signal.aborted) return;
        this.error = e.message;
        if (e.status === 401) return;
      }
      this.connected = false;
      this.change();
      await new Promise((r) => setTimeout(r, wait));
    }
  },
};

export function useStore() {
  const [version, set] = useState(store.version);
  useEffect(() => { store.listeners.add(set); set(store.version); return () => store.listeners.delete(set); }, []);
  return version;
}

/**
 * Reads a path again every so often while the page is seen; the first read counts as use.
 * @template {string} P
 * @param {P} path
 * @param {number} every milliseconds
 * @param {any[]} [deps]
 * @returns {{data: Answer<'GET', P> | null, error: Refusal | null, again: () => void}}
 */
export function usePoll(path, every, deps = []) {
  const [state, set] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    if (!path) return undefined;
    const abort = new AbortController();
    let timer;
    const read = async (background) => {
      clearTimeout(timer);
      try {
        if (!document.hidden || !background) {
          const data = await get(path, { background, signal: abort.signal });
          set({ data, error: null });
        }
      } catch (e) {
        if (abort.signal.aborted) return;
        set((old) => ({ data: old.data, error: e }));
      }
      if (!abort.signal.aborted && every) timer = setTimeout(() => read(true), every);
    };
    again.current = () => read(true);
    read(false);
    return () => { abort.abort(); clearTimeout(timer); };
  }, [path, every, ...deps]);
  return { ...state, again: () => again.current() };
}

/** The present, again every so often. */
export function useNow(every = 1000) {
  const [now, set] = useState(Date.now());
  useEffect(() => { const t = setInterval(() => { if (!document.hidden) set(Date.now()); }, every); return () => clearInterval(t); }, [every]);
  return now;
}

// The address: a path below /ui/.
const moved = new Set();
export const here = () => decodeURIComponent(location.pathname.replace(/^\/ui\/?/, ''));
export function go(path, replace) {
  history[replace ? 'replaceState' : 'pushState'](null, '', '/ui/' + path);
  for (const f of moved) f();
}
addEventListener('popstate', () => { for (const f of moved) f(); });
export function useRoute() {
  const [path, set] = useState(here());
  useEffect(() => { const f = () => set(here()); moved.add(f); f(); return () => moved.delete(f); }, []);
  return path;
}

export function Link({ to, children, ...rest }) {
  const click = (e) => {
    if (e.defaultPrevented || e.button || e.metaKey || e.ctrlKey || e.shiftKey || e.altKey) return;
    e.preventDefault();
    go(to);
  };
  return html`<a href=${'/ui/' + to} onClick=${click} ...${rest}>${children}</a>`;
}

// Formats.
export function bytes(n) {
  if (n == null || !isFinite(n)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i && n < 10 ? n.toFixed(1) : Math.round(n)) + ' ' + units[i];
}

export function span(ms) {
  const back = ms < 0;
  const s = Math.abs(ms) / 1000;
  const text = s < 60 ? Math.floor(s) + ' s' : s < 3600 ? Math.floor(s / 60) + ' min' : s < 86400 ? (s / 3600).toFixed(s < 36000 ? 1 : 0) + ' h' : Math.floor(s / 86400) + ' d';
  return back ? text + ' ago' : text;
}

export function millis(ms) {
  if (ms < 1) return '< 1 ms';
  if (ms < 1000) return Math.round(ms) + ' ms';
  if (ms < 60000) return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + ' s';
  return span(ms);
}

const clockFormat = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
const dayFormat = new Intl.DateTimeFormat(undefined, { year: 'numeric', month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
const dateFormat = new Intl.DateTimeFormat(undefined, { year: 'numeric', month: 'short', day: 'numeric' });
export const date = (t) => dateFormat.format(new Date(t));
export const clock = (t) => clockFormat.format(new Date(t));
export const day = (t) => dayFormat.format(new Date(t));

// Parts.
const marks = { Running: '●', Starting: '◐', Pending: '○', Resuming: '◐', Pausing: '◐', Paused: '❚❚', Stopping: '◌', Dead: '✕' };
export function Phase({ row }) {
  const text = row.phase === 'Paused' && row.memory ? `Paused, ${row.memory === 'RAM' ? 'in memory' : 'on disk'}` : row.phase;
  return html`<span class=${'phase phase-' + row.phase.toLowerCase()}><span class="mark" aria-hidden="true">${marks[row.phase] ?? '○'}</span>${text}</span>`;
}

/** The head of a page: what it shows, in a sentence, with a link to a page of the documentation. */
export function Title({ name, docs, button, children }) {
  return html`<div class="title-row"><div><h1>${name}</h1>
    <p class="lead">${children} <a href=${'/docs/' + docs} target="_blank" rel="noopener" aria-label=${'Learn more about ' + name.toLowerCase()}>Learn more</a></p></div>${button}</div>`;
}

export function Copy({ text, label }) {
  const [done, set] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); set(true); setTimeout(() => set(false), 1500); } catch { toast('This browser does not allow copying here.', true); }
  };
  return html`<button class="quiet small" onClick=${copy} aria-label=${'Copy ' + label}>${done ? 'Copied' : 'Copy'}</button>`;
}

const toasts = { list: [], n: 0, tell: () => {} };
export function toast(text, bad) {
  const t = { id: ++toasts.n, text, bad };
  toasts.list = [...toasts.list.slice(-3), t];
  toasts.tell();
  setTimeout(() => { toasts.list = toasts.list.filter((x) => x !== t); toasts.tell(); }, bad ? 9000 : 4000);
}
export function Toasts() {
  const [, set] = useState(0);
  toasts.tell = () => set((n) => n + 1);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${toasts.list.map((t) => html`<p key=${t.id} class=${t.bad ? 'toast bad' : 'toast'}>${t.text}</p>`)}
  </div>`;
}

/** Does something and tells how it ended. */
export async function act(what, work) {
  try { const v = await work(); if (what) toast(what); return v ?? true; } catch (e) { toast(e.message, true); return null; }
}

/** A dialog that Escape closes. */
export function Dialog({ title, onClose, children, wide }) {
  const ref = useRef(null);
  useLayoutEffect(() => { const d = ref.current; d.showModal(); return () => d.close(); }, []);
  return html`<dialog ref=${ref} class=${wide ? 'wide' : ''} aria-labelledby="dialog-title" onCancel=${(e) => { e.preventDefault(); onClose(); }}
      onClick=${(e) => { if (e.target === ref.current) onClose(); }}>
    <div class="dialog-body">
      <header><h2 id="dialog-title">${title}</h2><button class="quiet" onClick=${onClose} aria-label="Close">✕</button></header>
      ${children}
    </div>
  </dialog>`;
}

export function Confirm({ title, text, button, onYes, onClose }) {
  const [busy, set] = useState(false);
  const yes = async () => { set(true); await onYes(); onClose(); };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <p>${text}</p>
    <footer><button onClick=${onClose} autofocus>Cancel</button><button class="danger" disabled=${busy} onClick=${yes}>${button}</button></footer>
  <//>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p>${children}</div>`;
}

export function Fault({ error, onAgain }) {
  return html`<p class="fault" role="alert">${error.message}${onAgain && html` <button class="small" onClick=${onAgain}>Try again</button>`}</p>`;
}
