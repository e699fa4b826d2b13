// Snapshots and sandboxes as a tree: what was taken of what, and what started from it.
import { html, useMemo, useState, Link, store, useStore, usePoll, Phase, Title, Empty, Fault, Confirm, act, send, go, bytes, day, toast } from './lib.js';

/** Trees of sandboxes, their snapshots and forks, and the sandboxes that have started from a snapshot. */
function forest(snapshots, rows) {
  const nodes = new Map();
  const node = (key, more) => { if (!nodes.has(key)) nodes.set(key, { key, children: [] }); return Object.assign(nodes.get(key), more); };
  for (const s of snapshots) node('c/' + s.object, { snapshot: s });
  const started = rows.filter((r) => !r.member && r.from);
  const parents = new Set([...snapshots.map((s) => s.sandbox), ...started.map((r) => r.parent)]);
  for (const r of rows) if (!r.member && (r.from || parents.has(r.id))) node('s/' + r.id, { row: r });
  const child = new Set();
  const under = (parent, key) => { if (parent.key !== key && !child.has(key)) { parent.children.push(nodes.get(key)); child.add(key); } };
  for (const s of snapshots) if (s.sandbox) under(node('s/' + s.sandbox), 'c/' + s.object);
  for (const r of started) under(node(r.parent ? 's/' + r.parent : 'c/' + r.from), 's/' + r.id);
  const when = (n) => n.row?.created ?? n.snapshot?.created ?? n.children[0]?.snapshot?.created ?? '';
  const roots = [...nodes.values()].filter((n) => !child.has(n.key));
  const sort = (list) => list.sort((a, b) => (when(a) < when(b) ? -1 : 1)).forEach((n) => sort(n.children));
  sort(roots);
  return roots;
}

export default function SnapshotsPage() {
  const version = useStore();
  const { data, error, again } = usePoll('snapshots', 3000, [version]);
  const [removes, setRemoves] = useState(null);
  // What the server keeps for itself, such as the layers of builds, is in the tree only where a sandbox has started from it.
  const { roots, kept } = useMemo(() => {
    const rows = [...store.rows.values()];
    const from = new Set(rows.map((r) => r.from));
    const own = (s) => !s.id && !from.has(s.object);
    return { roots: forest((data ?? []).filter((s) => !own(s)), rows), kept: (data ?? []).filter(own) };
  }, [data, version]);
  const start = async (s) => {
    const made = await act('', () => send('POST', 'rest/sandboxes', { templateID: s.id, timeout: 3600, secure: true }));
    if (made) { toast('Created ' + made.sandboxID); go('sandboxes/' + made.sandboxID); }
  };
  const draw = (n) => html`<li key=${n.key}><div class="node">${n.key[0] === 's'
    ? n.row ? html`<${Link} to=${'sandboxes/' + n.row.id}><b>${n.row.name}</b><//> ${n.row.parent && html`<span class="tag">fork</span>`} <${Phase} row=${n.row} /> <span class="muted">${day(n.row.created)}</span>` : html`<span class="muted">sandbox ${n.key.slice(2)}, which has ended</span>`
    : n.snapshot ? html`<span aria-hidden="true">◆</span> <b>${n.snapshot.id || n.snapshot.object}</b> <span class="muted">${n.snapshot.phase}, ${bytes(n.snapshot.size)}${n.snapshot.memory ? ` with ${bytes(n.snapshot.memory)} of memory` : ', files only'}, ${day(n.snapshot.created)}</span>
        ${n.snapshot.id && html`<button class="small" onClick=${() => start(n.snapshot)}>Start one</button><button class="small quiet" onClick=${() => setRemoves(n.snapshot)}>Delete</button>`}`
      : html`<span aria-hidden="true">◇</span> <span class="muted">a snapshot that has been deleted</span>`}</div>
    ${n.children.length > 0 && html`<ul>${n.children.map(draw)}</ul>`}</li>`;
  return html`<div class="page"><${Title} name="Snapshots" docs="memory.html">The memory and files of a sandbox at one moment. Others start from them, with the same processes.<//>
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${!data && !error && html`<p class="loading" role="status">Loading…</p>`}
    ${data && !roots.length && html`<${Empty} title="No snapshots yet"><p>Take one on the page of a sandbox, or with <code>barchan snapshot ID</code>.</p><//>`}
    ${roots.length > 0 && html`<section class="panel" aria-label="Tree of snapshots and forks"><ul class="tree">${roots.map(draw)}</ul></section>`}
    ${kept.length > 0 && html`<p class="muted kept">${kept.length} more, with ${bytes(kept.reduce((sum, s) => sum + s.size, 0))}, ${kept.length === 1 ? 'is' : 'are'} the server’s own: layers of builds and memory of warm-ups, which it removes itself.</p>`}
    ${removes && html`<${Confirm} title=${'Delete ' + removes.id + '?'} text="Sandboxes that have started from it are not affected." button="Delete"
      onYes=${async () => { await act('Deleted', () => send('DELETE', 'rest/templates/' + encodeURIComponent(removes.id))); again(); }} onClose=${() => setRemoves(null)} />`}
  </div>`;
}
