// One sandbox: what became of it, what it uses, its log, terminal, files, ports and network.
import { html, useState, useEffect, useRef, useMemo, request, get, send, stream, go, Link, store, useStore, usePoll, useNow, Phase, Copy, Empty, Fault, Confirm, act, bytes, span, millis, clock, day, toast } from './lib.js';
import { Verbs } from './sandboxes.js';

const tabs = [['', 'Overview'], ['logs', 'Logs'], ['terminal', 'Terminal'], ['files', 'Files'], ['ports', 'Ports'], ['network', 'Network']];

export default function SandboxPage({ id, tab }) {
  const version = useStore();
  const row = store.rows.get(id);
  const [phase, reason] = [row?.phase, row?.reason];
  const { data, error, again } = usePoll(`sandboxes/${id}`, 15000, [phase, reason, row?.ends]);
  const now = useNow();
  const bar = useRef(null);
  useEffect(() => bar.current?.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'nearest' }), [tab, Boolean(row ?? data)]); // a phone shows some of the tabs
  const shown = row ?? data?.row;
  if (store.synced && !row && (error || data)) {
    return html`<div class="page"><p class="crumbs"><${Link} to="">Sandboxes<//></p>
      <${Ended} id=${id} /></div>`;
  }
  if (!shown) return error ? html`<div class="page"><${Fault} error=${error} onAgain=${again} /></div>` : html`<p class="loading" role="status">Loading…</p>`;
  const running = shown.phase === 'Running';
  const part = { '': Overview, logs: Logs, terminal: Terminal, files: Files, ports: Ports, network: Network }[tab] ?? Overview;
  return html`<div class="page">
    <p class="crumbs"><${Link} to="">Sandboxes<//> <span class="muted">/</span> <span class="mono muted">${id}</span> <${Copy} text=${id} label="the ID" /></p>
    <div class="heading"><h1>${shown.name}</h1><${Phase} row=${shown} /><${Verbs} rows=${[shown]} onDone=${(verb) => { if (verb === 'kill') go(''); else again(); }} /></div>
    <p class="facts">
      <span>Template <b>${shown.template ?? '–'}</b></span>
      <span><b>${shown.cpus}</b> CPU, <b>${bytes(shown.memoryMB * 2 ** 20)}</b></span>
      <span title=${day(shown.created)}>Created <b>${span(Math.max(0, now - Date.parse(shown.created)))}</b> ago</span>
      <span>${shown.ends ? html`Ends <b title=${day(shown.ends)}>in ${span(Math.max(0, Date.parse(shown.ends) - now))}</b>${data && html` <span>(then ${data.onTimeout === 'Pause' ? 'pauses' : 'is removed'})</span>`}` : 'Never ends'}</span>
      ${data?.node && html`<span>Node <b>${data.node}</b></span>`}
      ${data?.addresses?.[0] && html`<span>Address <b class="mono">${data.addresses.map((a) => a.ip ?? a).join(', ')}</b></span>`}
    </p>
    <nav class="tabs" aria-label="Parts of the sandbox" ref=${bar}>
      ${tabs.map(([path, name]) => html`<${Link} key=${path} to=${'sandboxes/' + id + (path && '/' + path)} aria-current=${path === tab ? 'page' : undefined}>${name}<//>`)}
    </nav>
    ${shown.reason && !running && html`<${Fault} error=${{ message: shown.reason }} />`}
    ${error && html`<${Fault} error=${error} onAgain=${again} />`}
    <${part} id=${id} row=${shown} data=${data} running=${running} again=${again} />
  </div>`;
}

const happened = { created: 'Created', updated: 'Changed', paused: 'Paused', resumed: 'Resumed', checkpointed: 'Snapshot taken', killed: 'Ended' };

/** What the server recorded of a sandbox that is gone. */
function Ended({ id }) {
  const { data, error } = usePoll('rest/events/sandboxes/' + id + '?orderAsc=true&limit=100', 0);
  const gone = usePoll('rest/sandboxes/' + id, 0); // for some minutes the answer says why
  const list = data ?? [];
  if (error?.status === 400) return html`<${Empty} title="There is no such sandbox"><p class="mono">${id}</p><p>This is not the ID of one.</p><//>`;
  const detail = ({ eventData: d }) => d?.execution ? `ran ${millis(d.execution.execution_time)} with ${d.execution.vcpu_count} CPU, ${bytes(d.execution.memory_mb * 2 ** 20)}` : d?.snapshot_id ?? Object.keys(d ?? {}).filter((k) => k.startsWith('set_')).map((k) => k.slice(4)).join(', ');
  const why = gone.error?.message.split(' it has ended: ')[1];
  return html`<${Empty} title="This sandbox does not exist any more"><p class="mono">${id}</p><p>${why ? why[0].toUpperCase() + why.slice(1) : 'It was killed, its time was up, or its program ended'}.</p><//>
    ${list.length > 0 && html`<section class="panel" aria-label="What became of it"><h2>What became of it</h2><div class="wide-table" tabindex="0" role="group" aria-label="Table"><table class="events"><thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">Detail</th></tr></thead><tbody>
      ${list.map((e) => html`<tr key=${e.id}><td>${day(e.timestamp)}</td><td><b>${happened[e.type.split('.').pop()] ?? e.type}</b></td><td class="muted">${detail(e)}</td></tr>`)}
    </tbody></table></div></section>`}
    ${(error || data && !list.length) && html`<p class="muted">${error && error.status !== 404 ? error.message : 'The server has no record of it.'}</p>`}`;
}

// Overview.

function Overview({ id, row, data, running }) {
  return html`
    <${Charts} id=${id} row=${row} running=${running} />
    <div class="columns">
      <section class="panel" aria-label="Timeline"><h2>Timeline</h2>${data ? html`<${Timeline} data=${data} row=${row} />` : html`<p class="loading">Loading…</p>`}</section>
      <div class="stack">
        <section class="panel" aria-label="Facts"><h2>Facts</h2>${data && html`<${Facts} data=${data} row=${row} />`}</section>
        ${data?.conditions?.length > 0 && html`<section class="panel" aria-label="Conditions"><h2>Conditions</h2><dl class="facts-list">
          ${data.conditions.map((c) => html`<dt key=${c.type}>${c.type}</dt><dd><b>${c.status === 'True' ? 'yes' : c.status === 'False' ? 'no' : 'unknown'}</b>, ${c.reason}${c.message && html`<br /><span class="muted">${c.message}</span>`}</dd>`)}
        </dl></section>`}
      </div>
    </div>`;
}

const words = { watch: 'seen by the watch, to the millisecond', object: 'written with the change', event: 'recorded by a controller', condition: 'to the second', node: 'measured by the node' };

const stepNames = {
  image: 'find or pull image', journal: 'write journal', address: 'take address', network: 'network namespace', firewall: 'firewall', snapshot: 'copy of the image', disk: 'make disk', mount: 'mount root', verify: 'verify memory',
  bundle: 'write configuration', record: 'container record', init: 'init containers', start: 'start gVisor', restore: 'restore gVisor', agent: 'agent answers', sidecars: 'other containers', warmup: 'warm-up', hold: 'hold address',
  freeze: 'freeze', thaw: 'thaw', checkpoint: 'write memory', sync: 'sync files', flush: 'flush to disk', stop: 'stop container', unmount: 'unmount', detach: 'remove network', bind_config: 'write variables', bind_agent: 'send variables',
};

/** The steps of an operation of the node, as bars over its time; the numbers are beside them. */
function Steps({ what, took, steps }) {
  const whole = Math.max(1, took, ...steps.map((s) => s.after + s.milliseconds));
  const percent = (n) => (100 * n / whole).toFixed(2) + '%';
  return html`<table class="steps"><caption class="sr">Steps of ${what}</caption>
    <thead class="sr"><tr><th scope="col">Step</th><th scope="col">Began after</th><th scope="col">Took</th></tr></thead><tbody>
    ${steps.map((s, i) => html`<tr key=${i}><th scope="row">${stepNames[s.name] ?? s.name.replaceAll('_', ' ')}</th>
      <td class="track"><span class="sr">${s.after} ms</span><span class="span" aria-hidden="true" style=${{ left: percent(s.after), width: percent(s.milliseconds) }}></span></td>
      <td class="num">${millis(s.milliseconds)}</td></tr>`)}
    </tbody></table>`;
}

function Timeline({ data, row }) {
  const now = useNow(1000);
  const list = data.timeline ?? [];
  if (!list.length) return html`<p class="muted">Nothing is known of its start.</p>`;
  const start = Date.parse(list[0].at);
  return html`<ol class="timeline">
    ${list.map((m, i) => {
      const at = Date.parse(m.at);
      const step = i ? at - Date.parse(list[i - 1].at) : 0;
      return html`<li key=${m.at + m.what} class=${m.bad ? 'bad' : ''} title=${words[m.source] ?? ''}>
        <span class="after">${i ? (m.source === 'condition' || list[i - 1].source === 'condition' ? '≈ ' : step < 1 ? '' : '+') + millis(Math.max(0, step)) : clock(at)}${i > 0 && html`<small>${millis(Math.max(0, at - start))}</small>`}</span>
        <span class="dot" aria-hidden="true"></span>
        <span><span class="what">${m.what}</span>${m.source === 'condition' && html` <span class="muted">≈</span>`}${m.detail && html`<span class="detail"><br />${m.detail}</span>`}${m.source === 'node' && html` <span class="muted">took ${millis(m.took ?? 0)}</span>${m.steps?.length > 0 && html`<${Steps} what=${m.what} took=${m.took ?? 0} steps=${m.steps} />`}`}</span>
      </li>`;
    })}
    <li class="now"><span class="after">${span(Math.max(0, now - start))}</span><span class="dot" aria-hidden="true"></span><span><span class="what">Now</span> <span class="detail">${row.phase.toLowerCase()}</span></span></li>
  </ol>`;
}

/** What a sandbox costs: its limits over the time of this run, or what its memory takes while it is paused. */
function costs(data, row, now) {
  if (row.phase === 'Paused') return row.memory === 'RAM' ? 'memory, until it is on disk' : data.memorySize ? bytes(data.memorySize) + ' on disk' : undefined;
  if (row.phase !== 'Running' || !row.started) return undefined;
  const hours = Math.max(0, now - Date.parse(row.started)) / 3600000;
  const round = (n) => (n < 0.01 ? '< 0.01' : n.toFixed(2));
  return html`${round(hours * row.cpus)} CPU hours, ${round(hours * row.memoryMB / 1024)} GiB hours <span class="muted">by its limits</span>`;
}

function Facts({ data, row }) {
  const now = useNow(10000);
  const list = [
    ['Runtime', data.runtime], ['Image', data.image && html`<span class="mono" title=${data.image}>${data.containers?.[0]?.Image || data.image}</span>`], ['Started', row.launch === 'warm' ? 'from a warm pool' : row.launch === 'cold' ? 'cold' : undefined],
    ['From', row.from && (row.parent ? html`a fork of <${Link} to=${'sandboxes/' + row.parent}>${store.rows.get(row.parent)?.name ?? row.parent}<//>` : html`snapshot <span class="mono">${row.from}</span>`)], ['Started at', data.startedAt && day(data.startedAt)], [row.phase === 'Paused' ? 'It holds' : 'This run takes', costs(data, row, now)], ['Exit code', data.exitCode],
    ['Traffic', data.publicTraffic ? 'public: anyone with the ID reaches its ports' : 'private: needs its token or a signed URL'],
    ['Wakes', data.autoResume ? 'yes, by traffic' : 'no, a client resumes it'], ['Idle', data.idle && `${data.idle.action ?? 'Pause'} after ${span(data.idle.afterSeconds * 1000)} without traffic`],
    ['Disk', data.diskMB && bytes(data.diskMB * 2 ** 20)],
    ...Object.entries(row.metadata ?? {}).map(([k, v]) => [k, html`<span class="mono">${v}</span>`]),
    ...(data.containers ?? []).map((c) => [data.containers.length > 1 ? c.Name : 'Program', html`<span class="mono">${c.Command || 'none'}</span>${c.State && html` <span class="muted">${c.State}, ${c.Restarts} restarts</span>`}`]),
  ].filter(([, v]) => v !== undefined && v !== null && v !== '');
  return html`<dl class="facts-list">${list.map(([k, v]) => html`<dt key=${k}>${k}</dt><dd>${v}</dd>`)}</dl>`;
}

const kept = 660; // samples of a chart: an hour that the sandbox has kept, and ten minutes since

function Charts({ id, row, running }) {
  const samples = useRef([]);
  const [, draw] = useState(0);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (!running) return undefined;
    const abort = new AbortController();
    let timer;
    const read = async () => {
      try {
        if (!document.hidden) {
          const since = samples.current.length ? '?start=' + samples.current.at(-1).timestampUnix : ''; // the first read has the past too
          const found = await get(`rest/sandboxes/${id}/metrics${since}`, { background: true, signal: abort.signal });
          const last = found.pop();
          if (last) {
            samples.current = [...samples.current, ...(since ? [] : found.map((s) => ({ ...s, at: s.timestampUnix }))), { ...last, at: Date.now() / 1000 }].slice(-kept);
            draw((n) => n + 1);
          }
          setError(null);
        }
      } catch (e) { if (abort.signal.aborted) return; setError(e); }
      if (!abort.signal.aborted) timer = setTimeout(read, 2000);
    };
    read();
    return () => { abort.abort(); clearTimeout(timer); };
  }, [id, running]);
  const list = samples.current;
  if (!running && !list.length) return null;
  const last = list[list.length - 1];
  const average = (value) => list.reduce((sum, s) => sum + value(s), 0) / list.length;
  const chart = (name, color, unit, value, most, text) => html`<section class="panel chart" aria-label=${name}><h2>${name} <span>${last ? text(last) : running ? 'measuring…' : 'not running'}</span></h2>
    <${Plot} label=${name} color=${color} unit=${unit} times=${list.map((s) => s.at)} values=${list.map(value)} most=${last ? most(last) : 1} /></section>`;
  return html`<div class="charts">
    ${chart('CPU', '--c1', (n) => n + ' %', (s) => s.cpuUsedPct, () => null, (s) => `${s.cpuUsedPct.toFixed(1)} % of ${s.cpuCount} CPU, ${average((x) => x.cpuUsedPct).toFixed(1)} % on average`)}
    ${chart('Memory', '--c2', (n) => n + ' MiB', (s) => s.memUsed / 2 ** 20, (s) => s.memTotal / 2 ** 20, (s) => `${bytes(s.memUsed)} of ${bytes(s.memTotal)}, ${bytes(average((x) => x.memUsed))} on average`)}
    ${chart('Disk', '--c3', (n) => n + ' MiB', (s) => s.diskUsed / 2 ** 20, () => null, (s) => `${bytes(s.diskUsed)} of ${bytes(s.diskTotal)}`)}
  </div>${error && html`<${Fault} error=${error} />`}`;
}

let plots; // uPlot is loaded with the first chart
const dark = matchMedia('(prefers-color-scheme: dark)');

function Plot({ label, color, unit, times, values, most }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [scheme, setScheme] = useState(dark.matches);
  useEffect(() => { const f = () => setScheme(dark.matches); dark.addEventListener('change', f); return () => dark.removeEventListener('change', f); }, []);
  useEffect(() => {
    let over, watch;
    plots ??= Promise.all([import('./vendor/uplot.js'), style('vendor/uplot.css')]).then(([m]) => m.default);
    plots.then((UPlot) => {
      if (over) return;
      const css = getComputedStyle(document.documentElement);
      const axis = { stroke: css.getPropertyValue('--muted'), grid: { stroke: css.getPropertyValue('--line'), width: 1 }, ticks: { show: false }, font: '11px ' + css.getPropertyValue('--font') };
      const stroke = css.getPropertyValue(color);
      plot.current = new UPlot({
        width: box.current.clientWidth, height: 130, padding: [8, 26, 0, 0], cursor: { y: false }, legend: { show: false },
        scales: { x: { time: true, range: (u) => { const end = u.data[0].at(-1) ?? Date.now() / 1000; return [Math.min(u.data[0][0] ?? end, end - 20), end]; } }, y: { range: (u, min, max) => [0, Math.max(max * 1.25, u.most ?? 0, 1)] } },
        axes: [{ ...axis, space: 70, size: 24, values: (u, all) => all.map((t) => clock(t * 1000)) }, { ...axis, size: 66, space: 34, values: (u, all) => all.map(unit) }],
        series: [{}, { stroke, width: 2, fill: stroke.trim() + '22', points: { show: (u) => u.data[0].length === 1 } }],
      }, [times, values], box.current);
      watch = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height: 130 }));
      watch.observe(box.current);
    });
    return () => { over = true; watch?.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, [scheme]);
  useEffect(() => {
    const u = plot.current;
    if (!u) return;
    u.most = most;
    u.setData([times, values]);
  });
  return html`<div class="plot" ref=${box} role="img" aria-label=${label + ' over time; the newest value is in the heading'}></div>`;
}

const styles = new Map();
/** Loads a style sheet of ours once. */
function style(path) {
  if (!styles.has(path)) {
    styles.set(path, new Promise((done) => {
      const link = document.createElement('link');
      Object.assign(link, { rel: 'stylesheet', href: '/ui/assets/' + path, onload: done, onerror: done });
      document.head.append(link);
    }));
  }
  return styles.get(path);
}

// Logs.

const maxLines = 5000;

function Logs({ id, row, data, running }) {
  const [source, setSource] = useState('all');
  const [container, setContainer] = useState('');
  const [filter, setFilter] = useState('');
  const [follow, setFollow] = useState(true);
  const [state, setState] = useState({ error: null, open: false });
  const lines = useRef([]);
  const [n, draw] = useState(0);
  const box = useRef(null);
  const alive = running || row.phase === 'Starting';
  useEffect(() => {
    lines.current = [];
    draw((n) => n + 1);
    if (!alive) return undefined;
    const abort = new AbortController();
    let waiting;
    const add = (l) => {
      lines.current.push(l);
      if (lines.current.length > maxLines * 1.2) lines.current = lines.current.slice(-maxLines);
      waiting ??= setTimeout(() => { waiting = null; draw((n) => n + 1); }, 60);
    };
    setState({ error: null, open: true });
    stream(`sandboxes/${id}/log?source=${source}&container=${encodeURIComponent(container)}`, add, abort.signal)
      .then(() => setState({ error: null, open: false }), (e) => { if (!abort.signal.aborted) setState({ error: e, open: false }); });
    return () => { abort.abort(); clearTimeout(waiting); };
  }, [id, source, container, alive]);
  useEffect(() => { if (follow && box.current) box.current.scrollTop = box.current.scrollHeight; }, [n, follow, filter]);
  const shown = filter ? lines.current.filter((l) => l.line.toLowerCase().includes(filter.toLowerCase())) : lines.current;
  const scrolled = () => { const el = box.current; setFollow(el.scrollHeight - el.scrollTop - el.clientHeight < 40); };
  const names = (data?.containers ?? []).slice(1).map((c) => c.Name);
  return html`<div class="bar">
      <label for="log-source">Source</label>
      <select id="log-source" value=${source} onChange=${(e) => setSource(e.target.value)}><option value="all">all</option><option value="entrypoint">program</option><option value="agent">agent</option></select>
      ${names.length > 0 && html`<label for="log-container">Container</label><select id="log-container" value=${container} onChange=${(e) => setContainer(e.target.value)}><option value="">first</option>${names.map((c) => html`<option key=${c}>${c}</option>`)}</select>`}
      <input type="search" class="grow" aria-label="Lines with this text" placeholder="Lines with…" value=${filter} onInput=${(e) => setFilter(e.target.value)} />
      <label class="check"><input type="checkbox" checked=${follow} onChange=${(e) => setFollow(e.target.checked)} /> Follow</label>
      <span class="muted" role="status">${state.open ? 'live, ' : alive ? 'ended, ' : ''}${shown.length.toLocaleString()} ${shown.length === 1 ? 'line' : 'lines'}</span>
    </div>
    ${state.error && html`<${Fault} error=${state.error} />`}
    ${alive ? html`<pre class="log" ref=${box} tabindex="0" aria-label="Log" onScroll=${scrolled}>${shown.slice(-2000).map((l) => html`<span class=${l.source === 'agent' ? 'agent' : l.stream}><span class="at">${clock(l.timestamp)} </span>${l.line}${'\n'}</span>`)}</pre>`
      : html`<${Empty} title=${'The sandbox is ' + row.phase.toLowerCase()}><p>${row.phase === 'Dead' ? 'Its log has ended with it. A program without a restartPolicy leaves its sandbox, and the log, after its end.' : 'Its log can be read while it runs.'}</p><//>`}`;
}

// Terminal.

let xterms;
/** xterm.js makes style elements, which the page's policy allows with its nonce alone. */
function loadTerminal() {
  xterms ??= (async () => {
    const nonce = document.querySelector('meta[name=style-nonce]').getAttribute('content');
    const create = document.createElement.bind(document);
    document.createElement = (name, o) => { const el = create(name, o); if (name === 'style') el.nonce = nonce; return el; };
    const [x, fit] = await Promise.all([import('./vendor/xterm.js'), import('./vendor/xterm-fit.js'), style('vendor/xterm.css')]);
    return { Terminal: x.Terminal, FitAddon: fit.FitAddon };
  })();
  return xterms;
}

function Terminal({ id, running, row }) {
  const box = useRef(null);
  const [state, setState] = useState('Connecting…');
  const [round, again] = useState(0);
  const may = running || row.phase === 'Paused';
  useEffect(() => {
    if (!may) return undefined;
    let over, ws, term, watch;
    (async () => {
      setState('Connecting…');
      try {
        const [{ Terminal, FitAddon }, { ticket, protocol }] = await Promise.all([loadTerminal(), send('POST', `sandboxes/${id}/terminal`)]);
        if (over) return;
        term = new Terminal({ fontFamily: getComputedStyle(document.documentElement).getPropertyValue('--mono'), fontSize: 13, cursorBlink: true, scrollback: 10000, screenReaderMode: false, theme: { background: '#16120e', foreground: '#f1eae1', cursor: '#f0a068' } });
        const fit = new FitAddon();
        term.loadAddon(fit);
        term.open(box.current);
        fit.fit();
        ws = new WebSocket(`${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/ui/api/sandboxes/${id}/terminal`, [protocol, ticket]);
        ws.binaryType = 'arraybuffer';
        const text = new TextEncoder();
        const size = () => { if (ws.readyState === 1) ws.send(JSON.stringify({ Cols: term.cols, Rows: term.rows })); };
        ws.onopen = () => { setState('Connected'); size(); term.focus(); };
        ws.onmessage = (e) => term.write(new Uint8Array(e.data));
        ws.onclose = (e) => { if (!over) setState(e.reason || 'The connection was cut.'); };
        term.onData((s) => { if (ws.readyState === 1) ws.send(text.encode(s)); });
        term.onBinary((s) => { if (ws.readyState === 1) ws.send(Uint8Array.from(s, (c) => c.charCodeAt(0))); });
        term.onResize(size);
        watch = new ResizeObserver(() => fit.fit());
        watch.observe(box.current);
      } catch (e) { if (!over) setState(e.message); }
    })();
    return () => { over = true; watch?.disconnect(); ws?.close(); term?.dispose(); };
  }, [id, may, round]);
  if (!may) return html`<${Empty} title=${'The sandbox is ' + row.phase.toLowerCase()}><p>A terminal needs a running one.</p><//>`;
  const open = state === 'Connected' || state === 'Connecting…';
  return html`<div class="bar"><span role="status" class=${open ? 'muted' : 'warn'}>${state}</span>${!open && html`<button class="small" onClick=${() => again(round + 1)}>Open again</button>`}
    <span class="grow"></span><span class="muted hide-small">It ends after 30 minutes without input.</span></div>
    <div class="term-box" ref=${box}></div>`;
}

// Files.

function FileIcon({ dir }) {
  return html`<svg viewBox="0 0 24 24" width="16" height="16" fill=${dir ? 'currentColor' : 'none'} fill-opacity=".2" stroke="currentColor" stroke-width="1.800" stroke-linejoin="round" aria-hidden="true" class="muted">
    <path d=${dir ? 'M3 6h6l2 2h10v11H3z' : 'M6 3h8l4 4v14H6zM14 3v4h4'} /></svg>`;
}

function Files({ id, row, running }) {
  const [path, setPath] = useState('/home/user');
  const [state, setState] = useState({ list: null, error: null });
  const [removes, setRemoves] = useState(null);
  const [busy, setBusy] = useState('');
  const [over, setOver] = useState(false);
  const picker = useRef(null);
  const may = running || row.phase === 'Paused';
  const load = async (to = path) => {
    try {
      const list = await get(`sandboxes/${id}/files?path=${encodeURIComponent(to)}`);
      list.entries = (list.entries ?? []).sort((a, b) => Number(Boolean(b.dir)) - Number(Boolean(a.dir)) || a.name.localeCompare(b.name));
      setState({ list, error: null });
      setPath(to);
    } catch (e) {
      if (to === '/home/user' && e.status === 404) return load('/');
      setState((s) => ({ list: s.list, error: e }));
    }
    return undefined;
  };
  useEffect(() => { if (may) load(); }, [id, may]);
  const join = (name) => (path === '/' ? '' : path) + '/' + name;
  const upload = async (files) => {
    for (const f of files) {
      setBusy(f.name);
      await act(f.name + ' is uploaded', () => request(`sandboxes/${id}/files?path=${encodeURIComponent(join(f.name))}`, { method: 'PUT', raw: f }));
    }
    setBusy('');
    load();
  };
  const makeDirectory = async () => {
    const name = prompt('Name of the new directory');
    if (name && await act('', () => request(`sandboxes/${id}/files?path=${encodeURIComponent(join(name))}`, { method: 'POST' }))) load();
  };
  if (!may) return html`<${Empty} title=${'The sandbox is ' + row.phase.toLowerCase()}><p>Its files can be reached while it runs.</p><//>`;
  const parts = path.split('/').filter(Boolean);
  return html`<div class="bar">
      <nav class="path" aria-label="Directory"><button class="quiet" onClick=${() => load('/')} aria-label="root">/</button>
        ${parts.map((p, i) => html`<button key=${i} class="quiet" onClick=${() => load('/' + parts.slice(0, i + 1).join('/'))}>${p}</button>${i < parts.length - 1 ? '/' : ''}`)}</nav>
      <span class="grow"></span>
      ${busy && html`<span class="muted" role="status">Uploading ${busy}…</span>`}
      <button onClick=${() => load()}>Reload</button><button onClick=${makeDirectory}>New directory</button>
      <button class="primary" onClick=${() => picker.current.click()}>Upload</button>
      <input type="file" multiple hidden ref=${picker} aria-label="Files to upload" onChange=${(e) => { upload([...e.target.files]); e.target.value = ''; }} />
    </div>
    ${state.error && html`<${Fault} error=${state.error} />`}
    <div class=${'panel wide-table' + (over ? ' drop' : '')} tabindex="0" role="group" aria-label="Files" onDragOver=${(e) => { e.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)} onDrop=${(e) => { e.preventDefault(); setOver(false); upload([...e.dataTransfer.files]); }}>
      <table><thead><tr><th scope="col">Name</th><th scope="col" class="num">Size</th><th scope="col" class="hide-small">Changed</th><th scope="col" class="hide-small">Mode</th><th scope="col" class="hide-small">Owner</th><th scope="col"><span class="sr">Actions</span></th></tr></thead>
      <tbody>
        ${(state.list?.entries ?? []).map((f) => html`<tr key=${f.path}>
          <td><span class="file-name"><${FileIcon} dir=${f.dir} />
            ${f.dir ? html`<button class="name" onClick=${() => load(f.path)}>${f.name}</button>` : html`<a href=${`/ui/api/sandboxes/${id}/download?path=${encodeURIComponent(f.path)}`} download=${f.name}>${f.name}</a>`}
            ${f.link && html`<span class="muted mono">→ ${f.link}</span>`}</span></td>
          <td class="num">${f.dir ? '' : bytes(f.size)}</td><td class="hide-small">${day(f.modified)}</td><td class="mono hide-small">${f.mode}</td><td class="hide-small">${f.owner}</td>
          <td class="num"><button class="quiet small" onClick=${() => setRemoves(f)} aria-label=${'Remove ' + f.name}>Remove</button></td></tr>`)}
        ${state.list && !state.list.entries.length && html`<tr><td colspan="6" class="muted">The directory is empty. Drop files here to upload them.</td></tr>`}
        ${state.list?.more > 0 && html`<tr><td colspan="6" class="muted">and ${state.list.more.toLocaleString()} more</td></tr>`}
      </tbody></table>
    </div>
    ${removes && html`<${Confirm} title=${'Remove ' + removes.name + '?'} text=${removes.dir ? 'The directory and all in it are removed from the sandbox.' : 'The file is removed from the sandbox.'} button="Remove"
      onYes=${async () => { await act('', () => request(`sandboxes/${id}/files?path=${encodeURIComponent(removes.path)}`, { method: 'DELETE' })); load(); }} onClose=${() => setRemoves(null)} />`}`;
}

// Ports.

function Ports({ id, running, data, row }) {
  const { data: list, error, again } = usePoll(running ? `sandboxes/${id}/ports` : null, 3000);
  if (!running) return html`<${Empty} title=${'The sandbox is ' + row.phase.toLowerCase()}><p>Ports are listed while it runs.</p><//>`;
  const open = (p) => (data?.publicTraffic ? p.url : `/ui/api/sandboxes/${id}/ports/${p.port}`);
  return html`${error && html`<${Fault} error=${error} onAgain=${again} />`}
    ${data && !data.publicTraffic && html`<p class="muted">The sandbox is private. These links are signed when you follow them and give access for ten minutes; <code>barchan open ${id} PORT --expires 1h</code> prints one for others.</p>`}
    ${list && !list.length && html`<${Empty} title="Nothing listens"><p>A port appears here as soon as a program in the sandbox listens on it.</p><//>`}
    ${list?.length > 0 && html`<div class="panel wide-table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th scope="col" class="num">Port</th><th scope="col">Program</th><th scope="col" class="hide-small">Listens on</th><th scope="col">URL</th></tr></thead><tbody>
      ${list.map((p) => html`<tr key=${p.port + p.address}><td class="num"><b>${p.port}</b></td><td>${p.process || '–'}</td><td class="mono hide-small">${p.address}</td>
        <td class="url"><a href=${open(p)} target="_blank" rel="noopener noreferrer" class="mono">${p.url}</a>${data?.publicTraffic && html` <${Copy} text=${p.url} label="the URL" />`}</td></tr>`)}
    </tbody></table></div>`}`;
}

// Network.

const sources = { sandbox: 'the sandbox’s own network settings', template: 'the networkPolicy of its template', host: 'the operator’s rules for all sandboxes' };

/** Asks the node about one destination. */
function Decides({ id }) {
  const [form, setForm] = useState({ to: '', port: '443', protocol: 'tcp' });
  const [state, setState] = useState({ busy: false, error: null, answer: null });
  const set = (name) => (e) => setForm({ ...form, [name]: e.target.value });
  const ask = async (e) => {
    e.preventDefault();
    setState({ busy: true, error: null, answer: null });
    try {
      const q = new URLSearchParams({ destination: form.to.trim(), port: form.port, protocol: form.protocol });
      setState({ busy: false, error: null, answer: await get(`rest/sandboxes/${id}/network/trace?${q}`) });
    } catch (e) { setState({ busy: false, error: e, answer: null }); }
  };
  const { answer: a } = state;
  return html`<form class="form decides" onSubmit=${ask} aria-label="Which rule decides?"><h2>Which rule decides?</h2>
      <div class="fields">
        <p><label for="trace-to">Address or name</label><input id="trace-to" required maxlength="253" autocomplete="off" spellcheck=${false} placeholder="example.org" value=${form.to} onInput=${set('to')} /></p>
        <p><label for="trace-port">Port</label><input id="trace-port" type="number" required min="1" max="65535" value=${form.port} onInput=${set('port')} /></p>
        <p><label for="trace-protocol">Protocol</label><select id="trace-protocol" value=${form.protocol} onChange=${set('protocol')}><option>tcp</option><option>udp</option><option>icmp</option></select></p>
        <button disabled=${state.busy}>Ask</button>
      </div>
      <div role="status">${a && html`<p><b class=${a.verdict === 'refused' ? 'phase-dead' : 'phase-running'}>${a.verdict}</b> ${a.destination}, ${a.protocol}${a.protocol === 'icmp' ? '' : ' ' + a.port}: <span class="rule">${a.rule}</span><br /><span class="muted">From ${sources[a.source] ?? a.source}. Nothing was sent.</span></p>`}</div>
      ${state.error && html`<${Fault} error=${state.error} />`}</form>`;
}

/** A rule of a NetworkPolicy, in words. */
function egressOf({ to, ports }) {
  const peer = (p) => p.ipBlock ? p.ipBlock.cidr + (p.ipBlock.except?.length ? ' without ' + p.ipBlock.except.join(', ') : '') : 'Pods and namespaces by their labels';
  const port = (p) => (p.protocol ?? 'TCP') + (p.port === undefined ? '' : ' ' + p.port + (p.endPort ? '–' + p.endPort : ''));
  return `${to?.length ? to.map(peer).join('; ') : 'all destinations'}, ${ports?.length ? ports.map(port).join(', ') : 'all ports'}`;
}

function Network({ id, data, again, row }) {
  const [form, setForm] = useState(null);
  const [error, setError] = useState(null);
  if (!data) return html`<p class="loading">Loading…</p>`;
  const n = data.network ?? {};
  const internet = n.internet !== false;
  const save = async (e) => {
    e.preventDefault();
    const list = (text) => text.split(/[\s,]+/).filter(Boolean);
    try {
      await send('PUT', `rest/sandboxes/${id}/network`, { allow_internet_access: form.internet, allowOut: list(form.allow), denyOut: list(form.deny) });
      setForm(null); setError(null); toast('The policy applies now'); again();
    } catch (e) { setError(e); }
  };
  const rules = [
    ...(data.reachable ?? []).map((x) => [x, 'allowed', 'the operator’s setting “reachable”, for all sandboxes']),
    ['private and reserved ranges, the host, other sandboxes', 'denied', 'the operator’s rules for all sandboxes'],
    ...(n.allowOut ?? []).map((x) => [x, 'allowed', 'an address or name of the policy’s allow list; it wins over the deny list']),
    ...(n.denyOut ?? []).map((x) => [x, 'denied', 'the policy’s deny list']),
    ['other public addresses', internet && !(n.denyOut ?? []).includes('0.0.0.0/0') ? 'allowed' : 'denied', internet ? 'the default' : 'the policy has no internet access'],
  ];
  return html`<div class="columns"><section class="panel" aria-label="Outbound"><h2>What it may reach, first match first</h2>
      <div class="wide-table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th scope="col">Destination</th><th scope="col">Verdict</th><th scope="col">Which rule decides</th></tr></thead><tbody>
      ${rules.map(([to, verdict, why]) => html`<tr key=${to + verdict}><td class="mono">${to}</td><td><b class=${verdict === 'allowed' ? 'phase-running' : 'phase-dead'}>${verdict}</b></td><td class="muted">${why}</td></tr>`)}
      </tbody></table></div>
      ${data.networkPolicy && html`<p class="muted">The networkPolicy of the template restricts it further; a packet leaves only where both allow it. ${data.networkPolicy.egress?.length ? 'That allows:' : 'That allows nothing.'}</p>
        <ul>${(data.networkPolicy.egress ?? []).map((r) => html`<li class="mono">${egressOf(r)}</li>`)}</ul>`}
      <${Decides} id=${id} /></section>
    <section class="panel" aria-label="Change the policy"><h2>Change it</h2>
      ${form ? html`<form class="form" onSubmit=${save}>
          <label class="check"><input type="checkbox" checked=${form.internet} onChange=${(e) => setForm({ ...form, internet: e.target.checked })} /> May reach public addresses</label><br />
          <label for="allow">Allowed addresses, ranges and names</label><textarea id="allow" rows="4" value=${form.allow} onInput=${(e) => setForm({ ...form, allow: e.target.value })}></textarea>
          <label for="deny">Denied addresses and ranges</label><textarea id="deny" rows="3" value=${form.deny} onInput=${(e) => setForm({ ...form, deny: e.target.value })}></textarea>
          ${error && html`<p class="fault" role="alert">${error.message}</p>`}
          <div class="verbs"><button class="primary">Apply</button><button type="button" onClick=${() => { setForm(null); setError(null); }}>Cancel</button></div></form>`
        : html`<p class="muted">A change applies to the running sandbox at once.</p><button disabled=${row.phase !== 'Running'} onClick=${() => setForm({ internet, allow: (n.allowOut ?? []).join('\n'), deny: (n.denyOut ?? []).join('\n') })}>Edit the policy</button>`}
    </section></div>`;
}
