// Warm pools: how many sandboxes are ready, and what claims waited for.
import { html, Link, Title, usePoll, Empty, Fault, millis, span, useNow } from './lib.js';

export default function PoolsPage() {
  const { data, error, again } = usePoll('pools', 2000);
  return html`<div class="page"><${Title} name="Warm pools" docs="pools.html">Sandboxes that are started ahead, so that a create takes one that is ready, within milliseconds.<//>
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${!data && !error && html`<p class="loading" role="status">Loading…</p>`}
    ${data && !data.length && html`<${Empty} title="No pools yet"><p>This makes one of three sandboxes: <code>barchan pool create NAME --template base --size 3</code></p><//>`}
    <div class="cards">${(data ?? []).map((p) => html`<${Pool} key=${p.name} pool=${p} />`)}</div>
  </div>`;
}

function Pool({ pool }) {
  const now = useNow();
  const s = pool.status ?? {};
  const desired = s.desiredReplicas ?? pool.desired;
  const claims = pool.atOnce + pool.waited + pool.cold;
  const progress = (pool.conditions ?? []).find((c) => c.type === 'Ready');
  return html`<section class="panel card" aria-label=${'Pool ' + pool.name}>
    <h2><span>${pool.name}</span><span class="muted">of ${pool.template}</span></h2>
    <div class="numbers">
      <div><span>Ready</span><b class="big">${s.currentReadyReplicas ?? pool.ready}</b></div><div><span>Desired</span><b class="big">${desired}</b></div>
      <div><span>Claimed</span><b class="big">${s.claimedReplicas ?? 0}</b></div><div><span>Hit rate</span><b class="big" title="Claims of live sandboxes that got a ready one at once">${claims ? Math.round(100 * pool.atOnce / claims) + ' %' : '–'}</b></div>
    </div>
    <meter min="0" max=${Math.max(1, desired)} low=${desired / 2} optimum=${desired} value=${s.currentReadyReplicas ?? pool.ready} aria-label="Ready of desired"></meter>
    <p class="muted">${progress ? html`${progress.message || progress.reason}` : 'Its controller has not looked at it yet.'}${pool.autoscale && `. It scales from ${pool.autoscale.minReplicas ?? 0} to ${pool.autoscale.maxReplicas} automatically.`}</p>
    <p class="muted">${claims ? `Of the claims of ${claims} live ${claims === 1 ? 'sandbox' : 'sandboxes'}, ${pool.atOnce} got a ready one at once, ${pool.waited} waited until one was ready, and ${pool.cold} started cold.` : 'No sandbox that lives was claimed from it.'}
      ${s.lastClaimTime && ` The last claim was ${span(now - Date.parse(s.lastClaimTime))} ago.`}</p>
    ${pool.waits.length > 0 && html`<h3>What made claims wait</h3><table class="waits"><thead class="sr"><tr><th scope="col">Sandbox</th><th scope="col">Waited for</th><th scope="col">Time</th></tr></thead><tbody>
      ${pool.waits.flatMap((w) => causes(w).map(([what, ms], i) => html`<tr key=${w.id + what}><th scope="row">${i === 0 && html`<${Link} to=${'sandboxes/' + w.id}>${w.name}<//>`}</th><td>${what}</td><td class="num">${ms ? millis(ms) : ''}</td></tr>`))}
    </tbody></table>`}
    <p class="muted mono">revision ${pool.revision.slice(0, 12)}</p>
  </section>`;
}

/** What a claim waited for, in order, with the milliseconds. */
function causes(w) {
  return [
    w.quota && ['the quota of the namespace', w.quota],
    w.member && [w.cold ? 'a member, in vain' : 'the start of a member', w.member],
    w.cold && ['a cold start', w.start],
  ].filter(Boolean);
}
