// The list of sandboxes: live, filtered, and drawn for the part that is seen.
import { html, useState, useEffect, useRef, useMemo, get, send, go, Link, store, useStore, useNow, Phase, Title, Dialog, Confirm, Empty, Fault, act, span, day, toast } from './lib.js';

const rowHeight = 48;
const spare = 8; // rows drawn beyond what is seen, either way
const groups = [
  { name: 'All', test: (r) => !r.member },
  { name: 'Running', test: (r) => !r.member && r.phase === 'Running' },
  { name: 'Paused', test: (r) => !r.member && (r.phase === 'Paused' || r.phase === 'Pausing') },
  { name: 'Starting', test: (r) => !r.member && (r.phase === 'Starting' || r.phase === 'Pending' || r.phase === 'Resuming') },
  { name: 'Ended', test: (r) => !r.member && (r.phase === 'Dead' || r.phase === 'Stopping') },
  { name: 'In pools', test: (r) => r.member },
];
const orders = { created: (a, b) => (a.created < b.created ? 1 : a.created > b.created ? -1 : a.id < b.id ? -1 : 1), name: (a, b) => a.name.localeCompare(b.name), template: (a, b) => (a.template ?? '').localeCompare(b.template ?? '') || orders.created(a, b) };
const metadataOf = (r) => Object.entries(r.metadata ?? {}).map(([k, v]) => k + '=' + v).join(' ');
const matches = (r, words) => {
  if (!words.length) return true;
  const text = (r.id + ' ' + r.name + ' ' + (r.template ?? '') + ' ' + r.phase + ' ' + metadataOf(r)).toLowerCase();
  return words.every((w) => text.includes(w));
};

/** The verbs that a sandbox's phase allows. */
export const allowed = (row) => ({
  pause: row.phase === 'Running' && !row.member, resume: row.phase === 'Paused', snapshot: row.phase === 'Running' && !row.member,
  fork: row.phase === 'Running' && !row.member, kill: !row.member && row.phase !== 'Stopping',
});
export const verbs = {
  pause: (id) => act('Paused', () => send('POST', `rest/sandboxes/${id}/pause`)),
  resume: (id) => act('Resumed', () => send('POST', `rest/sandboxes/${id}/connect`, { timeout: 3600 })),
  kill: (id) => act('Killed', () => send('DELETE', `rest/sandboxes/${id}`)),
  snapshot: async (id) => {
    const s = await act('', () => send('POST', `rest/sandboxes/${id}/snapshots`, {}));
    if (s) toast('Snapshot ' + s.snapshotID + ' is ready');
    return s;
  },
  fork: async (id, count = 1) => {
    const forks = await act('', () => send('POST', `rest/sandboxes/${id}/fork`, { count, timeout: 3600 }));
    if (!forks) return null;
    const failed = forks.filter((f) => f.error);
    if (failed.length) toast(failed[0].error.message, true);
    if (forks.length > failed.length) toast(`${forks.length - failed.length} ${forks.length - failed.length === 1 ? 'fork runs' : 'forks run'}`);
    return forks;
  },
};

/** The buttons of one sandbox, or of the marked ones. */
export function Verbs({ rows, onDone }) {
  const [busy, setBusy] = useState('');
  const [asks, setAsks] = useState(false);
  const can = (verb) => rows.length > 0 && rows.every((r) => allowed(r)[verb]);
  const run = (verb) => async () => {
    setBusy(verb);
    await Promise.all(rows.map((r) => verbs[verb](r.id)));
    setBusy('');
    onDone?.(verb);
  };
  const button = (verb, text) => can(verb) && html`<button key=${verb} disabled=${busy} aria-busy=${busy === verb} onClick=${run(verb)}>${text}</button>`;
  const many = rows.length > 1 ? rows.length + ' sandboxes' : rows[0]?.name;
  return html`<div class="verbs">
    ${button('pause', 'Pause')}${button('resume', 'Resume')}${button('snapshot', 'Snapshot')}${button('fork', 'Fork')}
    ${can('kill') && html`<button class="danger" disabled=${busy} onClick=${() => setAsks(true)}>Kill</button>`}
    ${asks && html`<${Confirm} title=${'Kill ' + many + '?'} text="Processes, memory and files are lost. Snapshots stay." button="Kill" onYes=${run('kill')} onClose=${() => setAsks(false)} />`}
  </div>`;
}

function Create({ onClose }) {
  const [templates, setTemplates] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const [form, setForm] = useState({ templateID: '', minutes: 60, metadata: '', env: '', internet: true });
  useEffect(() => {
    get('rest/templates').then((all) => {
      setTemplates(all);
      const first = all.find((t) => t.aliases?.includes('base')) ?? all[0];
      setForm((f) => ({ ...f, templateID: f.templateID || first?.aliases?.[0] || first?.templateID || '' }));
    }, setError);
  }, []);
  const set = (name) => (e) => setForm({ ...form, [name]: e.target.type === 'checkbox' ? e.target.checked : e.target.value });
  const pairs = (text, what) => {
    /** @type {Record<string, string>} */
    const found = {};
    for (const line of text.split('\n').map((l) => l.trim()).filter(Boolean)) {
      const at = line.indexOf('=');
      if (at < 1) throw new Error(`${what}: “${line}” is not of the form name=value`);
      found[line.slice(0, at)] = line.slice(at + 1);
    }
    return found;
  };
  const submit = async (e) => {
    e.preventDefault();
    setBusy(true);
    try {
      const made = await send('POST', 'rest/sandboxes', {
        templateID: form.templateID, timeout: Math.round(form.minutes * 60), secure: true, allow_internet_access: form.internet,
        metadata: pairs(form.metadata, 'Metadata'), envVars: pairs(form.env, 'Variables'),
      });
      toast('Created ' + made.sandboxID);
      onClose();
      go('sandboxes/' + made.sandboxID);
    } catch (e) { setError(e); setBusy(false); }
  };
  return html`<${Dialog} title="New sandbox" onClose=${onClose}>
    <form onSubmit=${submit} class="form">
      <label for="create-template">Template or snapshot</label>
      <input id="create-template" list="create-templates" required value=${form.templateID} onInput=${set('templateID')} autofocus />
      <datalist id="create-templates">${(templates ?? []).map((t) => html`<option key=${t.templateID} value=${t.aliases?.[0] ?? t.templateID} />`)}</datalist>
      <label for="create-minutes">Lives for, in minutes</label>
      <input id="create-minutes" type="number" min="1" max="1440" required value=${form.minutes} onInput=${set('minutes')} />
      <label for="create-metadata">Metadata, one name=value a line</label>
      <textarea id="create-metadata" rows="2" value=${form.metadata} onInput=${set('metadata')}></textarea>
      <label for="create-env">Variables, one name=value a line</label>
      <textarea id="create-env" rows="2" value=${form.env} onInput=${set('env')}></textarea>
      <label class="check"><input type="checkbox" checked=${form.internet} onChange=${set('internet')} /> May reach public addresses</label>
      ${error && html`<p class="fault" role="alert">${error.message}</p>`}
      <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${busy}>${busy ? 'Creating…' : 'Create'}</button></footer>
    </form>
  <//>`;
}

/** One row. It is drawn again only if what it shows has changed: a list that scrolls draws the rows that come into view. */
function Row({ row: r, at, marked, current, age, left, soon }) {
  return useMemo(() => html`<div class=${'row' + (current ? ' cursor' : '')} role="row" aria-rowindex=${at + 2} aria-selected=${marked} data-id=${r.id} style=${{ transform: `translateY(${at * rowHeight}px)` }}>
      <span role="cell" class="c-mark">${!r.member && html`<input type="checkbox" tabindex="-1" aria-label=${'Mark ' + r.name} checked=${marked} />`}</span>
      <span role="cell" class="c-name"><${Link} to=${'sandboxes/' + r.id} class="name">${r.name}<//><span class="id">${r.id}</span></span>
      <span role="cell" class="c-phase" title=${r.reason ?? ''}><${Phase} row=${r} />${r.reason && html`<span class="reason">${r.reason}</span>`}</span>
      <span role="cell" class="c-template">${r.from && !r.template ? html`<span title=${'from ' + r.from}>snapshot</span>` : r.template ?? '–'}${r.launch === 'warm' && !r.member ? html` <span class="tag" title="It came from a warm pool">warm</span>` : ''}</span>
      <span role="cell" class="c-size">${r.cpus} CPU, ${r.memoryMB >= 1024 ? r.memoryMB / 1024 + ' GiB' : r.memoryMB + ' MiB'}</span>
      <span role="cell" class="c-age" title=${day(r.created)}>${age}</span>
      <span role="cell" class="c-ends">${r.ends ? html`<span title=${day(r.ends)} class=${soon ? 'warn' : ''}>${left}</span>` : html`<span class="muted">never</span>`}</span>
      <span role="cell" class="c-meta muted" title=${metadataOf(r)}>${metadataOf(r)}</span>
    </div>`, [r, at, marked, current, age, left, soon]);
}

/** The rows that are seen of a list, in a box that scrolls. */
function Rows({ rows, box, filter, marked, onMark }) {
  const now = useNow(1000);
  const [seen, setSeen] = useState({ from: 0, to: 40 });
  // A key may follow another before the first is drawn, so that the handler reads what a ref holds.
  const at = useRef({ filter, row: -1 });
  if (at.current.filter !== filter) at.current = { filter, row: -1 };
  const [, redraw] = useState(0);
  const look = () => {
    const el = box.current;
    const from = Math.max(0, Math.floor(el.scrollTop / rowHeight) - spare);
    const to = from + Math.ceil(el.clientHeight / rowHeight) + 1 + 2 * spare; // always as many, so that rows keep their elements
    setSeen((old) => (old.from === from && old.to === to ? old : { from, to }));
  };
  useEffect(() => {
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  useEffect(look, [rows.length]);
  const key = (e) => {
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10, Home: -rows.length, End: rows.length };
    if (e.target.closest('button, a, input') && e.key !== 'ArrowDown' && e.key !== 'ArrowUp') return;
    const row = rows[at.current.row];
    if (e.key in moves && rows.length) {
      e.preventDefault();
      const next = Math.max(0, Math.min(rows.length - 1, at.current.row + moves[e.key]));
      at.current.row = next;
      redraw((n) => n + 1);
      const el = box.current;
      if (next * rowHeight < el.scrollTop) el.scrollTop = next * rowHeight;
      else if ((next + 1) * rowHeight > el.scrollTop + el.clientHeight) el.scrollTop = (next + 1) * rowHeight - el.clientHeight;
    } else if (e.key === 'Enter' && row) { e.preventDefault(); go('sandboxes/' + row.id); } else if (e.key === ' ' && row) {
      e.preventDefault();
      onMark(row.id, !marked.has(row.id));
    }
  };
  const change = (e) => onMark(e.target.closest('[data-id]').dataset.id, e.target.checked);
  const elements = seen.to - seen.from; // each shows every so many-th row, so that scrolling makes none
  return html`<div class="scroll" role="rowgroup" ref=${box} onScroll=${look} onKeyDown=${key} onChange=${change} tabindex="0" aria-label="Rows; arrow keys move, Enter opens, Space marks">
    <div role="presentation" class="tall" style=${{ height: rows.length * rowHeight + 'px' }}>
      ${rows.slice(seen.from, seen.to).map((r, i) => {
        const place = seen.from + i;
        const left = r.ends ? Date.parse(r.ends) - now : 0;
        return html`<${Row} key=${place % elements} row=${r} at=${place} marked=${marked.has(r.id)} current=${place === at.current.row} age=${span(Math.max(0, now - Date.parse(r.created)))} left=${left > 0 ? 'in ' + span(left) : 'now'} soon=${left < 60000} />`;
      })}
    </div>
  </div>`;
}

export function SandboxesPage({ session }) {
  const version = useStore();
  const [text, setText] = useState('');
  const [group, setGroup] = useState(0);
  const [order, setOrder] = useState({ by: 'created', back: false });
  const [marked, setMarked] = useState(() => new Set());
  const [creates, setCreates] = useState(false);
  const search = useRef(null);
  const box = useRef(null);

  const { rows, counts } = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const counts = groups.map(() => 0);
    const found = [];
    for (const r of store.rows.values()) {
      if (!matches(r, words)) continue;
      groups.forEach((g, i) => { if (g.test(r)) { counts[i]++; if (i === group) found.push(r); } });
    }
    const sort = orders[order.by];
    found.sort(order.back ? (a, b) => sort(b, a) : sort);
    return { rows: found, counts };
  }, [version, text, group, order]);
  const chosen = marked.size ? rows.filter((r) => marked.has(r.id)) : [];

  useEffect(() => {
    const key = (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector('dialog[open]')) return;
      if (e.target.closest?.('input, textarea, select')) {
        if (e.key === 'Escape') { setText(''); box.current?.focus(); }
        return;
      }
      if (e.key === '/') { e.preventDefault(); search.current.focus(); }
      if (e.key === 'n') { e.preventDefault(); setCreates(true); }
    };
    addEventListener('keydown', key);
    return () => removeEventListener('keydown', key);
  }, []);
  const mark = (id, on) => setMarked((old) => { const next = new Set(old); if (on) next.add(id); else next.delete(id); return next; });
  const down = (order.by === 'created') !== order.back;
  const head = (name, label, extra = '') => html`<span role="columnheader" class=${extra} aria-sort=${order.by !== name ? 'none' : down ? 'descending' : 'ascending'}>
    <button class="sort" onClick=${() => setOrder({ by: name, back: order.by === name && !order.back })}>${label}${order.by === name ? html`<span aria-hidden="true"> ${down ? '↓' : '↑'}</span>` : ''}</button></span>`;

  return html`<div class="page list-page">
    <${Title} name="Sandboxes" docs="concepts.html" button=${html`<button class="primary" onClick=${() => setCreates(true)} aria-keyshortcuts="n">New sandbox</button>`}>Isolated environments, each with files, processes and a network of its own, in which agents run code.<//>
    <div class="tools">
      <input type="search" ref=${search} aria-label="Filter by name, ID, template or metadata" placeholder="Filter by name, ID, template or metadata  ( / )" value=${text} onInput=${(e) => { setText(e.target.value); }} />
      <div class="chips" role="group" aria-label="State">
        ${groups.map((g, i) => html`<button key=${g.name} class="chip" aria-pressed=${i === group} onClick=${() => { setGroup(i); }}>${g.name} <span class="count">${counts[i].toLocaleString()}</span></button>`)}
      </div>
    </div>
    ${chosen.length > 0 && html`<div class="marked-bar" role="region" aria-label="Marked sandboxes"><span>${chosen.length} marked</span><${Verbs} rows=${chosen} onDone=${() => setMarked(new Set())} /><button class="quiet" onClick=${() => setMarked(new Set())}>Unmark</button></div>`}
    ${store.error && !store.connected && html`<${Fault} error=${{ message: 'Not live: ' + store.error }} />`}
    <div class="table-wrap"><div class="table" role="table" aria-label="Sandboxes" aria-rowcount=${rows.length + 1}>
      <div role="rowgroup"><div class="row head" role="row" aria-rowindex="1">
        <span role="columnheader" class="c-mark"><span class="sr">Mark</span></span>
        ${head('name', 'Name', 'c-name')}<span role="columnheader" class="c-phase">State</span>${head('template', 'Template', 'c-template')}
        <span role="columnheader" class="c-size">Size</span>${head('created', 'Age', 'c-age')}<span role="columnheader" class="c-ends">Ends</span><span role="columnheader" class="c-meta">Metadata</span>
      </div></div>
      <${Rows} rows=${rows} box=${box} filter=${group + ' ' + text} marked=${marked} onMark=${mark} />
    </div>
    ${!rows.length && (store.synced
      ? html`<${Empty} title=${text || group ? 'No sandbox matches' : 'No sandboxes yet'}>
          ${text || group ? html`<button onClick=${() => { setText(''); setGroup(0); }}>Show all</button>` : html`<p>Create one here, or with <code>barchan run --keep</code>. It appears at once.</p>`}<//>`
      : html`<p class="loading" role="status">Loading…</p>`)}</div>
    ${creates && html`<${Create} onClose=${() => setCreates(false)} />`}
  </div>`;
}
