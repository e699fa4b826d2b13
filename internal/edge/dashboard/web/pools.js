// Warm pools: how many sandboxes are ready, and whether claims find one.
import { html, Link, usePoll, Empty, Fault, act, send, span, useNow } from './lib.js';

export default function PoolsPage() {
  const { data, error, again } = usePoll('pools', 2000);
  return html`<div class="page"><div class="title-row"><h1>Warm pools</h1></div><br />
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${!data && !error && html`<p class="loading" role="status">Loading…</p>`}
    ${data && !data.length && html`<${Empty} title="No pools yet"><p>A pool holds ready sandboxes of a template, so that a create takes milliseconds: <code>barchan pool create NAME --template base --size 3</code></p><//>`}
    <div class="cards">${(data ?? []).map((p) => html`<${Pool} key=${p.name} pool=${p} />`)}</div>
  </div>`;
}

function Pool({ pool }) {
  const now = useNow();
  const s = pool.status ?? {};
  const desired = s.desiredReplicas ?? pool.desired;
  const started = pool.warm + pool.cold;
  const progress = (pool.conditions ?? []).find((c) => c.type === 'Ready');
  return html`<section class="panel card" aria-label=${'Pool ' + pool.name}>
    <h2><span>${pool.name}</span><span class="muted">of ${pool.template}</span></h2>
    <div class="numbers">
      <div><span>Ready</span><b class="big">${s.currentReadyReplicas ?? pool.ready}</b></div><div><span>Desired</span><b class="big">${desired}</b></div>
      <div><span>Claimed</span><b class="big">${s.claimedReplicas ?? 0}</b></div><div><span>Hit rate</span><b class="big">${started ? Math.round(100 * pool.warm / started) + ' %' : '–'}</b></div>
    </div>
    <meter min="0" max=${Math.max(1, desired)} low=${desired / 2} optimum=${desired} value=${s.currentReadyReplicas ?? pool.ready} aria-label="Ready of desired"></meter>
    <p class="muted">${progress ? html`${progress.message || progress.reason}` : 'Its controller has not looked at it yet.'}</p>
    <p class="muted">${started ? `Of ${started} live ${started === 1 ? 'sandbox' : 'sandboxes'} of the template, ${pool.warm} came from a pool and ${pool.cold} started cold.` : 'No sandbox of the template lives.'}
      ${s.lastClaimTime && ` The last claim was ${span(now - Date.parse(s.lastClaimTime))} ago.`}${pool.autoscale && ` It scales from ${pool.autoscale.minReplicas ?? 0} to ${pool.autoscale.maxReplicas} by itself.`}</p>
    <p class="muted mono">revision ${pool.revision.slice(0, 12)}</p>
  </section>`;
}
