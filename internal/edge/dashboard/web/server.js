// The server: what is wrong with it, the namespace's quota, and keys.
import { html, useState, Title, usePoll, useNow, Fault, Confirm, Dialog, Copy, act, send, bytes, date, day, span } from './lib.js';

const units = { count: (n) => n.toLocaleString(), millicores: (n) => n / 1000 + ' CPU', bytes };

export default function ServerPage({ session }) {
  const { data, error, again } = usePoll('server', 3000);
  const keys = usePoll('rest/api-keys', 15000);
  const now = useNow();
  const [creates, setCreates] = useState(false);
  const [removes, setRemoves] = useState(null);
  return html`<div class="page"><${Title} name="Server" docs="operations.html">Its health, and what the namespace ${session.namespace} has of it.<//>
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${/* All at once: what came later would move what is about to be clicked. */!data || !keys.data && !keys.error ? !error && html`<p class="loading" role="status">Loading…</p>` : html`<div class="columns"><div class="stack">
      <section class="panel" aria-label="Conditions"><h2>Conditions</h2>
        ${data.conditions.length ? html`<ul>${data.conditions.map((c) => html`<li key=${c.name}><b class="phase-dead">${c.name}</b> for ${span(now - Date.parse(c.since))}: ${c.reason}</li>`)}</ul><p class="muted">New work is refused until this has passed; running sandboxes continue.</p>`
          : html`<p><b class="phase-running">● Nothing is wrong.</b> New sandboxes are accepted.</p>`}</section>
      <section class="panel" aria-label="Nodes"><h2>Nodes</h2>
        <div class="wide-table" tabindex="0" role="group" aria-label="Table"><table class="nodes"><thead><tr><th scope="col">Node</th><th scope="col" class="num">Running</th><th scope="col" class="num">Paused</th><th scope="col" class="num">CPU</th><th scope="col" class="num">Memory</th></tr></thead><tbody>
        ${data.nodes.map((n) => html`<tr key=${n.name}><th scope="row">${n.name}</th><td class="num">${n.running}</td><td class="num">${n.paused}</td><td class="num">${n.cpus}</td><td class="num">${bytes(n.memoryMB * 2 ** 20)}</td></tr>`)}
        </tbody></table></div><p class="muted">Sandboxes of ${session.namespace}, members of pools included, and the limits of those that run.</p></section>
      <section class="panel" aria-label="Quota"><h2>Quota and use of ${session.namespace}</h2>
        <div class="wide-table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th scope="col">What</th><th scope="col" class="num">Used</th><th scope="col" class="num">Paused</th><th scope="col" class="num">Limit</th><th scope="col" class="share hide-small"><span class="sr">Share of the limit</span></th></tr></thead><tbody>
        ${data.quota.map((q) => html`<tr key=${q.name}><th scope="row">${q.name}</th>${q.used === undefined ? html`<td class="num">${units[q.unit](q.running)}</td><td class="num">${units[q.unit](q.paused)}</td>` : html`<td class="num">${units[q.unit](q.used)}</td><td></td>`}<td class="num">${q.most === undefined ? 'none' : units[q.unit](q.most)}</td>
          <td class="hide-small">${q.most !== undefined && html`<meter min="0" max=${Math.max(1, q.most)} value=${q.used ?? q.running + (data.countsPaused ? q.paused : 0)} aria-label=${q.name + ' used'}></meter>`}</td></tr>`)}
        </tbody></table></div>
        <p class="muted">Used: running sandboxes, and all objects of the other rows. What is paused ${data.countsPaused ? 'counts against the limits, too' : 'does not count against the limits'}.</p></section>
      <section class="panel" aria-label="API keys"><div class="title-row"><h2>API keys</h2>${session.scope !== 'use' && html`<button onClick=${() => setCreates(true)}>New key</button>`}</div>
        ${keys.error?.status === 403 ? html`<p class="muted">The key that you are signed in with has the scope ${session.scope}: it may not see or make keys.</p>` : keys.error && html`<${Fault} error=${keys.error} onAgain=${keys.again} />`}
        ${keys.data?.length > 0 && html`<div class="wide-table" tabindex="0" role="group" aria-label="Table"><table class="keys"><thead><tr><th scope="col">Name</th><th scope="col">Scope</th><th scope="col">Begins with</th><th scope="col">Created</th><th scope="col">Last used</th><th scope="col">Expires</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>
        ${keys.data.map((k) => html`<tr key=${k.id}><th scope="row">${k.name || html`<span class="muted">unnamed</span>`}</th><td>${k.scope}</td><td class="mono">${k.mask ? k.mask.prefix + k.mask.maskedValuePrefix + '…' : ''}</td><td title=${day(k.createdAt)}>${date(k.createdAt)}</td>
          <td>${k.lastUsed ? html`<span title="Exact to an hour">${date(k.lastUsed)}</span>` : html`<span class="muted">never</span>`}</td>
          <td>${!k.expiresAt ? html`<span class="muted">never</span>` : Date.parse(k.expiresAt) < now ? html`<span class="warn">expired</span>` : html`<span title=${day(k.expiresAt)}>${date(k.expiresAt)}</span>`}</td>
          <td class="num"><button class="small quiet" onClick=${() => setRemoves(k)} aria-label=${'Revoke ' + k.name}>Revoke</button></td></tr>`)}
        </tbody></table></div>`}</section>
    </div>
    <section class="panel" aria-label="About"><h2>About</h2><dl class="facts-list"><dt>Version</dt><dd class="mono">${data.about.version}</dd><dt>Node</dt><dd>${data.about.node}</dd><dt>Role</dt><dd>${data.about.role}</dd>
      <dt>Up for</dt><dd title=${day(data.about.startedAt)}>${span(now - Date.parse(data.about.startedAt))}</dd><dt>Signed in with</dt><dd>the key ${session.key}, of scope ${session.scope}${session.expiresAt && `, until ${day(session.expiresAt)}`}</dd></dl>
      <p class="muted"><br />Keys: <b>/</b> filters, <b>n</b> makes a sandbox, arrows and Enter move in the list, Space marks. <b>g</b> and then <b>s</b>, <b>p</b>, <b>t</b>, <b>f</b> or <b>o</b> goes to a page.</p></section></div>`}
    ${creates && html`<${NewKey} scopes=${session.scope === 'admin' ? ['use', 'manage', 'admin'] : ['use']} onClose=${() => { setCreates(false); keys.again(); }} />`}
    ${removes && html`<${Confirm} title=${'Revoke ' + removes.name + '?'} text="Its clients, and the pages that are signed in with it, lose access at once." button="Revoke"
      onYes=${async () => { await act('Revoked', () => send('DELETE', 'rest/api-keys/' + removes.id)); keys.again(); }} onClose=${() => setRemoves(null)} />`}
  </div>`;
}

/** What a key of a scope may do, in short. */
const rights = { use: 'run sandboxes', manage: 'run sandboxes; change templates, snapshots, volumes', admin: 'everything in the namespace' };
const lives = { 'a day': 1, '30 days': 30, 'a year': 365 };

function NewKey({ scopes, onClose }) {
  /** @type {[{name: string, scope: import('./api').KeyScope, life: string}, any]} */
  const [form, setForm] = useState({ name: '', scope: 'use', life: '' });
  const [key, setKey] = useState(null);
  const [error, setError] = useState(null);
  const set = (name) => (e) => setForm({ ...form, [name]: e.target.value });
  const submit = async (e) => {
    e.preventDefault();
    const ends = form.life ? { expiresAt: new Date(Date.now() + lives[form.life] * 86400000).toISOString() } : {};
    try { setKey((await send('POST', 'rest/api-keys', { name: form.name, scope: form.scope, ...ends })).key); } catch (e) { setError(e); }
  };
  return html`<${Dialog} title="New API key" onClose=${onClose}>
    ${key ? html`<p>This is the only time that it is shown.</p><p><code>${key}</code> <${Copy} text=${key} label="the key" /></p><footer><button class="primary" onClick=${onClose}>Done</button></footer>`
      : html`<form class="form" onSubmit=${submit}><label for="key-name">Name</label><input id="key-name" required value=${form.name} onInput=${set('name')} autofocus />
        <label for="key-scope">Scope</label><select id="key-scope" value=${form.scope} onChange=${set('scope')}>${scopes.map((s) => html`<option key=${s} value=${s}>${s}: ${rights[s]}</option>`)}</select>
        <label for="key-life">Valid for</label><select id="key-life" value=${form.life} onChange=${set('life')}><option value="">no end; until revoked</option>${Object.keys(lives).map((l) => html`<option key=${l}>${l}</option>`)}</select>
        ${error && html`<p class="fault" role="alert">${error.message}</p>`}<footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary">Create</button></footer></form>`}
  <//>`;
}
