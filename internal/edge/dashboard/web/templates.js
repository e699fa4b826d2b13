// Templates, and their builds with logs.
import { html, useState, useEffect, get, send, go, Link, Title, Empty, Fault, Dialog, Copy, usePoll, act, day, clock, toast } from './lib.js';

export default function TemplatesPage({ rest }) {
  const { data, error, again } = usePoll('rest/templates', 5000);
  const shown = rest[0];
  return html`<div class="page"><${Title} name="Templates" docs="templates.html">What sandboxes are made from: an image, its size and its rules.<//>
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${!data && !error && html`<p class="loading" role="status">Loading…</p>`}
    ${data && !data.length && html`<${Empty} title="No templates"><p><code>barchan build -t NAME DIR</code> makes one from a Dockerfile.</p><//>`}
    ${data?.length > 0 && html`<div class="panel wide-table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th scope="col">Name</th><th scope="col" class="hide-small">ID</th><th scope="col">Size</th><th scope="col" class="num hide-small">Builds</th><th scope="col" class="hide-small">Updated</th><th scope="col" class="hide-small">Seen by</th><th scope="col"><span class="sr">Actions</span></th></tr></thead><tbody>
      ${data.map((t) => html`<tr key=${t.templateID}><td><b><${Link} to=${'templates/' + t.templateID}>${t.names?.[0] ?? t.aliases?.[0] ?? t.templateID}<//></b></td><td class="mono hide-small">${t.templateID}</td><td>${t.cpuCount} CPU, ${t.memoryMB} MiB</td>
        <td class="num hide-small">${t.buildCount ?? ''}</td><td class="hide-small">${day(t.updatedAt)}</td><td class="hide-small">${t.public ? 'all namespaces' : 'this namespace'}</td>
        <td class="num"><button class="small" onClick=${() => start(t)}>Start one</button></td></tr>`)}
    </tbody></table></div>`}
    ${shown && html`<${Builds} id=${shown} onClose=${() => go('templates')} />`}
  </div>`;
}

async function start(t) {
  const made = await act('', () => send('POST', 'rest/sandboxes', { templateID: t.templateID, timeout: 3600, secure: true }));
  if (made) { toast('Created ' + made.sandboxID); go('sandboxes/' + made.sandboxID); }
}

function Builds({ id, onClose }) {
  const { data, error } = usePoll('rest/templates/' + id, 3000);
  const [build, setBuild] = useState(null);
  const list = data?.builds ?? [];
  const shown = build ?? list[0]?.buildID;
  return html`<${Dialog} title=${data?.names?.[0] ?? data?.aliases?.[0] ?? id} onClose=${onClose} wide>
    ${error && html`<${Fault} error=${error} />`}
    ${list.length ? html`<div class="bar"><label for="build">Build</label><select id="build" value=${shown} onChange=${(e) => setBuild(e.target.value)}>
        ${list.map((b) => html`<option key=${b.buildID} value=${b.buildID}>${b.status}, ${day(b.createdAt)}</option>`)}</select></div>
        <${BuildLog} template=${id} build=${shown} key=${shown} />`
      : data && html`<p class="muted">No build has made this template: it was applied as an object, or is the server's own.</p>`}
    <${Revisions} id=${id} />
  <//>`;
}

function Revisions({ id }) {
  const { data, error } = usePoll(`templates/${id}/revisions`, 5000);
  if (error) return html`<${Fault} error=${error} />`;
  return html`<h3>Revisions</h3>
    ${data && html`<p class="muted">A revision is the hash of all that decides what a sandbox runs. Claims get the current one alone; sandboxes that run keep theirs.</p>
    <div class="wide-table" tabindex="0" role="group" aria-label="Revisions"><table class="revisions"><thead><tr><th scope="col" class="num">Number</th><th scope="col">Tag</th><th scope="col">Revision</th><th scope="col">Since</th><th scope="col" class="num">Sandboxes</th><th scope="col"><span class="sr">State</span></th></tr></thead><tbody>
      ${data.slice(0, 50).map((r) => html`<tr key=${r.tag + r.number}><td class="num">${r.number}</td><td>${r.tag}</td><td class="mono" title=${r.revision}>${r.revision.slice(0, 12)}</td><td>${day(r.seen)}</td><td class="num">${r.sandboxes}</td><td>${r.current && html`<span class="tag">current</span>`}</td></tr>`)}
    </tbody></table></div>`}`;
}

function BuildLog({ template, build }) {
  const { data, error } = usePoll(`rest/templates/${template}/builds/${build}/status?logsOffset=0`, 2000);
  if (error?.status === 404) return html`<p class="muted">This one has no log: the template was applied as an object, or is the server’s own.</p>`;
  if (error) return html`<${Fault} error=${error} />`;
  return html`<p><b>${data?.status ?? '…'}</b>${data?.reason?.message && html` <span class="warn">${data.reason.message}</span>`}</p>
    <pre class="log" tabindex="0" aria-label="Log of the build">${(data?.logEntries ?? []).map((l) => html`<span class=${l.level === 'error' ? 'stderr' : ''}><span class="at">${clock(l.timestamp)} </span>${l.message}${'\n'}</span>`)}</pre>`;
}
