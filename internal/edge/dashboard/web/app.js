// The frame of the page: sign-in, navigation, and which page is shown.
import { html, render, useState, useEffect, useLayoutEffect, useRef, request, get, send, go, here, useRoute, Link, store, useStore, onSignedOut, Toasts, Refusal } from './lib.js';
import { SandboxesPage } from './sandboxes.js';

const pages = [
  { path: '', name: 'Sandboxes', icon: 'M3 6l9-4 9 4v12l-9 4-9-4zM3 6l9 4 9-4M12 10v12' },
  { path: 'pools', name: 'Pools', icon: 'M3 7c3-3 6 3 9 0s6 3 9 0M3 13c3-3 6 3 9 0s6 3 9 0M3 19c3-3 6 3 9 0s6 3 9 0', load: () => import('./pools.js') },
  { path: 'templates', name: 'Templates', icon: 'M4 4h16v5H4zM4 13h7v7H4zM15 13h5v7h-5z', load: () => import('./templates.js') },
  { path: 'snapshots', name: 'Snapshots', icon: 'M6 3v18M6 9c0 4 12 2 12 7M18 16v5M18 3v2', load: () => import('./snapshots.js') },
  { path: 'server', name: 'Server', icon: 'M3 4h18v6H3zM3 14h18v6H3zM7 7h.01M7 17h.01', load: () => import('./server.js') },
];

/** A page whose module is loaded when it is first shown. */
function Later({ load, ...rest }) {
  const [page, set] = useState(null);
  useEffect(() => { let over; load().then((m) => { if (!over) set(() => m.default); }); return () => { over = true; }; }, [load]);
  return page ? html`<${page} ...${rest} />` : html`<p class="loading" role="status">Loading…</p>`;
}
const loadSandbox = () => import('./sandbox.js');

function Icon({ d }) {
  return html`<svg viewBox="0 0 24 24" width="18" height="18" fill="none" stroke="currentColor" stroke-width="1.800" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d=${d} /></svg>`;
}

function SignIn({ message, onDone }) {
  const [key, setKey] = useState('');
  const [error, setError] = useState(message);
  const [busy, setBusy] = useState(false);
  const submit = async (e) => {
    e.preventDefault();
    setBusy(true);
    try { onDone(await send('POST', 'session', { key })); } catch (e) { setError(e.message); setBusy(false); }
  };
  return html`<main class="signin">
    <form onSubmit=${submit}>
      <img src="/ui/assets/icon.svg" width="56" height="56" alt="" />
      <h1>Barchan</h1>
      <p class="muted">runs the code of AI agents in isolated sandboxes. <a href="/docs/" target="_blank" rel="noopener">What is that?</a></p>
      <label for="key">API key</label>
      <input id="key" type="password" autocomplete="off" spellcheck="false" required placeholder="e2b_…" value=${key} autofocus
        aria-describedby="key-help" onInput=${(e) => setKey(e.target.value)} />
      ${error && html`<p class="fault" role="alert">${error}</p>`}
      <button class="primary" disabled=${busy}>Sign in</button>
      <p id="key-help" class="muted">On the server, <code>barchan ui</code> prints a link that signs you in, and <code>barchan key create</code> makes a key.</p>
    </form>
  </main>`;
}

function Connection() {
  useStore();
  const text = store.connected ? 'Live' : store.error ? 'Cut off' : 'Connecting';
  return html`<span class=${'live ' + (store.connected ? 'on' : 'off')} title=${store.error} role="status"><span aria-hidden="true">●</span> ${text}</span>`;
}

function Shell({ session, onSignOut }) {
  const route = useRoute();
  const [first, rest] = [route.split('/')[0], route.split('/').slice(1)];
  const at = first === 'sandboxes' ? '' : first;
  const main = useRef(null);
  const shown = useRef(route);
  // Before the page is painted: later, it would take the focus from what a quick user has chosen since.
  useLayoutEffect(() => {
    if (shown.current.split('/').slice(0, 2).join('/') !== route.split('/').slice(0, 2).join('/')) main.current?.focus({ preventScroll: true });
    shown.current = route;
    const page = pages.find((p) => p.path === at);
    document.title = (rest[0] ? rest[0] + ' · ' : '') + (page?.name ?? 'Not found') + ' · Barchan';
  }, [route]);
  let body;
  if (first === 'sandboxes' && rest[0]) body = html`<${Later} load=${loadSandbox} id=${rest[0]} tab=${rest[1] ?? ''} key=${rest[0]} />`;
  else if (at === '') body = html`<${SandboxesPage} session=${session} />`;
  else {
    const page = pages.find((p) => p.path === at);
    body = page ? html`<${Later} load=${page.load} rest=${rest} session=${session} key=${at} />` : html`<div class="page"><h1>Not found</h1><p>There is no such page. <${Link} to="">Show the sandboxes<//>.</p></div>`;
  }
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header class="top">
      <${Link} to="" class="brand"><img src="/ui/assets/icon.svg" width="26" height="26" alt="" /> Barchan<//>
      <nav aria-label="Pages">
        ${pages.map((p) => html`<${Link} key=${p.path} to=${p.path} aria-current=${p.path === at ? 'page' : undefined}><${Icon} d=${p.icon} /><span>${p.name}</span><//>`)}
      </nav>
      <div class="who">
        <${Connection} />
        <a href="/docs/" target="_blank" rel="noopener" class="docs">Docs</a>
        <span class="namespace" title=${'Signed in by the key ' + session.key}>${session.namespace}</span>
        <button class="quiet small" onClick=${onSignOut}>Sign out</button>
      </div>
    </header>
    <main id="main" tabindex="-1" ref=${main}>${body}</main>
    <${Toasts} />`;
}

function App({ start }) {
  const [session, setSession] = useState(start.session);
  const [message, setMessage] = useState(start.message);
  onSignedOut(() => { store.stop?.(); setMessage('The session has ended. Sign in again.'); setSession(null); });
  useEffect(() => { if (session) store.start(); }, [session]);
  useEffect(() => { // keys for pages: g and the first letter
    let g = 0;
    const key = (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest?.('input, textarea, select, dialog, .term-box')) return;
      const page = Date.now() - g < 1000 && { s: '', p: 'pools', t: 'templates', f: 'snapshots', o: 'server' }[e.key];
      if (e.key === 'g') g = Date.now();
      else if (typeof page === 'string') { g = 0; go(page); }
    };
    addEventListener('keydown', key);
    return () => removeEventListener('keydown', key);
  }, []);
  if (!session) return html`<${SignIn} message=${message} onDone=${(s) => { setMessage(''); setSession(s); }} />`;
  const signOut = async () => {
    store.stop?.();
    try { await request('session', { method: 'DELETE' }); } catch { /* it has ended */ }
    setMessage('');
    setSession(null);
  };
  return html`<${Shell} session=${session} onSignOut=${signOut} />`;
}

/** A link's ticket is after the #, which browsers send to no server, and leaves the address at once. */
async function begin() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get('ticket');
  if (ticket) {
    history.replaceState(null, '', location.pathname);
    try { return { session: await send('POST', 'session', { ticket }), message: '' }; } catch (e) { return { session: null, message: e.message }; }
  }
  try { return { session: await get('session'), message: '' }; } catch (e) { return { session: null, message: e instanceof Refusal && e.status === 401 ? '' : e.message }; }
}

begin().then((start) => { render(html`<${App} start=${start} />`, document.getElementById('app')); });
