// The main job through the unmodified E2B SDK. Where a server is comes from E2B_API_URL,
// E2B_SANDBOX_URL and E2B_API_KEY, as `barchan env` prints them.
import test, { after, before, describe } from 'node:test'
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import http from 'node:http'
import { promisify } from 'node:util'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError, AuthenticationError } from 'e2b'
import { machineOnly, until } from './lib.mjs'

const run = promisify(execFile)

describe('one sandbox', () => {
  let sbx
  before(async () => {
    sbx = await Sandbox.create({ metadata: { suite: 'one', 'odd key/ü': 'a b&c=d' }, envs: { GREETING: 'hello' }, timeoutMs: 300_000 })
  })
  after(async () => { await sbx?.kill() })

  test('the first program', async () => {
    const res = await sbx.commands.run('python3 -c "print(6*7)"')
    assert.equal(res.stdout, '42\n')
    assert.equal(res.exitCode, 0)
  })
  test('runs inside gVisor, as user, with sudo', async () => {
    assert.match((await sbx.commands.run('sudo dmesg | head -5')).stdout, /gVisor/)
    assert.equal((await sbx.commands.run('whoami; pwd; sudo whoami')).stdout, 'user\n/home/user\nroot\n')
    assert.equal((await sbx.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  })
  test('has an address of its own', async () => {
    assert.match((await sbx.commands.run('hostname -I || ip -4 addr')).stdout, /\d+\.\d+\.\d+\.\d+/)
  })
  test('env: of the sandbox, of the command', async () => {
    assert.equal((await sbx.commands.run('echo $GREETING $MORE', { envs: { MORE: 'world' } })).stdout, 'hello world\n')
  })
  test('stdout, stderr, exit code, cwd', async () => {
    let out = '', err = ''
    await assert.rejects(
      sbx.commands.run('pwd; echo oops >&2; exit 7', { cwd: '/tmp', onStdout: (d) => { out += d }, onStderr: (d) => { err += d } }),
      (e) => e instanceof CommandExitError && e.exitCode === 7 && e.stderr === 'oops\n',
    )
    assert.deepEqual([out, err], ['/tmp\n', 'oops\n'])
    await assert.rejects(sbx.commands.run('true', { cwd: '/nowhere' }), /cwd '\/nowhere' does not exist/)
    await assert.rejects(sbx.commands.run('no-such-command'), (e) => e instanceof CommandExitError && e.exitCode === 127)
    await assert.rejects(sbx.commands.run('true', { user: 'nobodyhere' }), /invalid username: 'nobodyhere'/)
  })
  test('much output arrives whole', async () => {
    const res = await sbx.commands.run('head -c 3000000 /dev/zero | tr "\\0" x')
    assert.equal(res.stdout.length, 3_000_000)
  })
  test('a timeout kills the command', async () => {
    await assert.rejects(sbx.commands.run('sleep 60', { timeoutMs: 500 }), TimeoutError)
    await until('the background process is gone', async () => !(await sbx.commands.list()).some((p) => p.args.join(' ').includes('sleep 60')))
  })
  test('background, stdin, list, kill, reconnect', async () => {
    const cat = await sbx.commands.run('cat', { background: true, stdin: true })
    let seen = ''
    const again = await sbx.commands.connect(cat.pid, { onStdout: (d) => { seen += d } })
    await sbx.commands.sendStdin(cat.pid, 'ping\n')
    await until('the echo', () => seen === 'ping\n' && cat.stdout === 'ping\n')
    assert.ok((await sbx.commands.list()).some((p) => p.pid === cat.pid))
    await again.disconnect()
    await sbx.commands.closeStdin(cat.pid)
    assert.equal((await cat.wait()).exitCode, 0)

    const background = await sbx.commands.run('sleep 300', { background: true })
    assert.equal(await background.kill(), true)
    await assert.rejects(background.wait(), CommandExitError)
    assert.equal(await sbx.commands.kill(999_999), false)
  })
  test('pty: size, input, resize, kill', async () => {
    let text = ''
    const decode = new TextDecoder()
    const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: (d) => { text += decode.decode(d) }, timeoutMs: 60_000 })
    await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('stty size\n'))
    await until('the first size', () => text.includes('24 80'))
    await sbx.pty.resize(pty.pid, { cols: 100, rows: 40 })
    await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('stty size\n'))
    await until('the second size', () => text.includes('40 100'))
    await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('exit 3\n'))
    await assert.rejects(pty.wait(), (e) => e.exitCode === 3)
  })
  test('files: text, bytes, stream, metadata', async () => {
    const { files } = sbx
    const info = await files.write('notes/a.txt', 'grüße', { metadata: { origin: 'test' } })
    assert.equal(info.path, '/home/user/notes/a.txt')
    assert.equal(await files.read('notes/a.txt'), 'grüße')
    assert.equal((await files.getInfo('notes/a.txt')).metadata?.origin, 'test')
    const bytes = new Uint8Array(1 << 20).map((_, i) => (i * 7) & 255)
    await files.write('blob', bytes.buffer)
    assert.deepEqual(await files.read('blob', { format: 'bytes' }), bytes)
    let length = 0
    for await (const part of await files.read('blob', { format: 'stream' })) length += part.length
    assert.equal(length, bytes.length)
    await files.write([{ path: 'm/1', data: 'one' }, { path: 'm/2', data: 'two' }])
    assert.deepEqual((await files.list('m')).map((e) => e.name).sort(), ['1', '2'])
    assert.equal(await files.exists('m/3'), false)
    await files.rename('m/1', 'm/deep/3')
    assert.equal(await files.read('m/deep/3'), 'one')
    await files.remove('m')
    assert.equal(await files.exists('m/2'), false)
    assert.equal(await files.makeDir('d'), true)
    assert.equal(await files.makeDir('d'), false)
    await assert.rejects(files.read('not-there'), NotFoundError)
    assert.equal((await sbx.commands.run('stat -c "%U %a" notes/a.txt')).stdout, 'user 644\n')
  })
  test('files: watch, recursive too', async () => {
    await sbx.files.makeDir('w/deep')
    const events = []
    const watcher = await sbx.files.watchDir('w', (e) => { events.push(`${e.type} ${e.name}`) }, { recursive: true })
    await sbx.files.write('w/deep/x', '1')
    await until('the event', () => events.some((e) => e.endsWith('deep/x')))
    await watcher.stop()
  })
  test('signed URLs', async () => {
    const put = await sbx.uploadUrl('signed.txt', { useSignatureExpiration: 60 })
    const form = new FormData()
    form.append('file', new Blob(['by url']), 'signed.txt')
    assert.equal((await fetch(put, { method: 'POST', body: form })).status, 200)
    const get = await sbx.downloadUrl('signed.txt', { useSignatureExpiration: 60 })
    assert.equal(await (await fetch(get)).text(), 'by url')
    assert.equal((await fetch(get.replace(/signature=[^&]+/, 'signature=v1_forged'))).status, 401)
  })
  test('getHost: an HTTP server inside', async () => {
    await sbx.files.write('site/index.html', 'served from inside')
    const server = await sbx.commands.run('python3 -m http.server 8123 --directory site', { background: true })
    const get = (host) => new Promise((resolve, reject) => {
      const base = new URL(process.env.E2B_API_URL)
      const req = http.get({ host: base.hostname, port: base.port, path: '/', headers: { Host: host } }, (res) => {
        let body = ''
        res.on('data', (d) => { body += d })
        res.on('end', () => resolve({ status: res.statusCode, body }))
      })
      req.on('error', reject)
    })
    const host = sbx.getHost(8123)
    assert.match(host, new RegExp(`^8123-${sbx.sandboxId}\\.`))
    const ok = await until('the server', async () => { const r = await get(host); return r.status === 200 && r })
    assert.equal(ok.body, 'served from inside')
    const closed = await get(sbx.getHost(8124))
    assert.equal(closed.status, 502)
    assert.deepEqual(JSON.parse(closed.body), { sandboxId: sbx.sandboxId, message: 'The sandbox is running but port is not open', port: 8124, code: 502 })
    await server.kill()
  })
  test('info, timeout, metrics, health', async () => {
    const info = await sbx.getInfo()
    assert.equal(info.sandboxId, sbx.sandboxId)
    assert.equal(info.metadata.suite, 'one')
    assert.equal(info.metadata['odd key/ü'], 'a b&c=d')
    const sent = Date.now()
    await sbx.setTimeout(600_000)
    const answered = Date.now()
    const end = (await sbx.getInfo()).endAt.getTime() - 600_000
    assert.ok(end >= sent - 1000 && end <= answered + 1000, `sent at ${sent}, answered at ${answered}: ${end}`)
    assert.equal(await sbx.isRunning(), true)
    const metrics = await sbx.getMetrics()
    assert.ok(metrics.at(-1).memTotal > 0)
  })
  test('connect from another process', async () => {
    await sbx.files.write('handed-over', 'yes')
    const code = `import('e2b').then(async ({Sandbox}) => { const s = await Sandbox.connect('${sbx.sandboxId}'); process.stdout.write(await s.files.read('handed-over')) })`
    assert.equal((await run('node', ['-e', code], { cwd: import.meta.dirname })).stdout, 'yes')
  })
  test('pause and resume keep processes and files', machineOnly, async () => {
    const ticker = await sbx.commands.run('i=0; while true; do i=$((i+1)); echo $i > /tmp/tick; sleep 0.05; done', { background: true, timeoutMs: 0 })
    await until('a tick', () => sbx.files.exists('/tmp/tick'))
    assert.equal(await sbx.pause(), true)
    assert.equal(await sbx.isRunning(), false)
    assert.equal(await sbx.pause(), false)
    const listed = await Sandbox.list({ query: { metadata: { suite: 'one' }, state: ['paused'] } }).nextItems()
    assert.deepEqual(listed.map((s) => s.sandboxId), [sbx.sandboxId])
    const back = await Sandbox.connect(sbx.sandboxId, { timeoutMs: 300_000 })
    assert.equal(await back.isRunning(), true)
    const before = Number(await back.files.read('/tmp/tick'))
    await until('the ticker continues', async () => Number((await back.files.read('/tmp/tick')) || 0) > before)
    assert.equal(await back.commands.kill(ticker.pid), true)
  })
})

test('kill: gone at once, twice is false', async () => {
  const sbx = await Sandbox.create()
  const stream = await sbx.commands.run('sleep 300', { background: true, timeoutMs: 0 })
  const ended = assert.rejects(stream.wait())
  assert.equal(await sbx.kill(), true)
  await ended
  assert.equal(await sbx.isRunning(), false)
  assert.equal(await sbx.kill(), false)
  await assert.rejects(Sandbox.connect(sbx.sandboxId), NotFoundError)
})

test('a timeout kills, autoPause pauses', machineOnly, async () => {
  const [ends, pauses] = await Promise.all([
    Sandbox.create({ timeoutMs: 2_000, metadata: { suite: 'timeout' } }),
    Sandbox.create({ timeoutMs: 2_000, metadata: { suite: 'timeout' }, lifecycle: { onTimeout: 'pause', autoResume: false } }),
  ])
  await until('the end', async () => !(await ends.isRunning()) && !(await pauses.isRunning()))
  await assert.rejects(ends.getInfo(), NotFoundError)
  await until('the pause', async () => (await pauses.getInfo()).state === 'paused')
  assert.equal(await Sandbox.kill(pauses.sandboxId), true)
})

test('list: metadata, state, pages', async () => {
  const all = await Promise.all([1, 2, 3].map((n) => Sandbox.create({ metadata: { suite: 'list', n: String(n) } })))
  try {
    const pages = Sandbox.list({ query: { metadata: { suite: 'list' } }, limit: 2 })
    const got = []
    while (pages.hasNext) got.push(...(await pages.nextItems()).map((s) => s.sandboxId))
    assert.deepEqual(got.sort(), all.map((s) => s.sandboxId).sort())
    const one = await Sandbox.list({ query: { metadata: { suite: 'list', n: '2' } } }).nextItems()
    assert.deepEqual(one.map((s) => s.sandboxId), [all[1].sandboxId])
  } finally {
    await Promise.all(all.map((s) => s.kill()))
  }
})

// Two processes share a machine with other tests: they get fewer.
const atOnce = Number(process.env.AT_ONCE ?? 20)

test(`${atOnce} sandboxes at once`, async () => {
  const all = await Promise.all(Array.from({ length: atOnce }, (_, i) => Sandbox.create({ envs: { N: String(i) } })))
  try {
    const out = await Promise.all(all.map((s) => s.commands.run('echo $N')))
    assert.deepEqual(out.map((o) => o.stdout.trim()), all.map((_, i) => String(i)))
    assert.equal(new Set(all.map((s) => s.sandboxId)).size, atOnce)
  } finally {
    await Promise.all(all.map((s) => s.kill()))
  }
})

test('errors name the cause', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /template 'no-such-template' not found/)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
  await assert.rejects(Sandbox.connect('i0000000000000000000'), NotFoundError)
  await assert.rejects(Sandbox.create({ timeoutMs: 1000 * 3600 * 24 * 365 }), /Timeout cannot be greater than/)
})
