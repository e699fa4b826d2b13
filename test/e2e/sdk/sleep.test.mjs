// Sleeping and waking through the unmodified E2B SDK, on a server that writes memory to disk at once.
import test, { describe } from 'node:test'
import assert from 'node:assert/strict'
import http from 'node:http'
import { NotFoundError, Sandbox } from 'e2b'

const until = async (what, probe, ms = 120_000) => {
  for (const end = Date.now() + ms; Date.now() < end; ) {
    const got = await probe()
    if (got) return got
    await new Promise((r) => setTimeout(r, 20))
  }
  assert.fail(`${what}: not within ${ms} ms`)
}

// get sends a request to a port of a sandbox by its host name, which need not resolve.
const get = (sbx, port, path = '/') => new Promise((resolve, reject) => {
  const url = new URL(process.env.E2B_SANDBOX_URL)
  const req = http.get({ host: url.hostname, port: url.port, path, headers: { Host: sbx.getHost(port) } }, (res) => {
    let body = ''
    res.on('data', (d) => { body += d })
    res.on('end', () => resolve({ status: res.statusCode, body }))
    res.on('error', reject)
  })
  req.on('error', reject)
})

const counter = `import http.server, itertools
numbers = itertools.count(1)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        n = next(numbers)
        self.send_response(200); self.end_headers(); self.wfile.write(str(n).encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", 8080), H).serve_forever()
`

const serving = async (opts) => {
  const sbx = await Sandbox.create({ timeoutMs: 300_000, ...opts })
  await sbx.files.write('counter.py', counter)
  await sbx.commands.run('python3 counter.py', { background: true, timeoutMs: 0 })
  await until('the counter serves', async () => (await get(sbx, 8080)).status === 200)
  return sbx
}

describe('pause', () => {
  test('a paused sandbox does not run, is listed as paused, and traffic does not wake it', async () => {
    const sbx = await serving()
    const before = Number((await get(sbx, 8080)).body)
    assert.ok(await sbx.pause())
    assert.equal(await sbx.isRunning(), false)
    assert.equal((await sbx.getInfo()).state, 'paused')
    assert.equal(await Sandbox.pause(sbx.sandboxId), false)
    assert.equal((await get(sbx, 8080)).status, 502)
    assert.equal((await sbx.getInfo()).state, 'paused')
    const again = await Sandbox.connect(sbx.sandboxId)
    assert.equal(Number((await get(again, 8080)).body), before + 1)
    assert.equal(await sbx.isRunning(), true)
    // The handle from before is as good as the new one: tokens stay.
    assert.equal((await sbx.commands.run('echo same')).stdout, 'same\n')
    await sbx.kill()
  })
  test('commands and terminals live on, and can be joined again', async () => {
    const sbx = await Sandbox.create({ timeoutMs: 300_000 })
    const cat = await sbx.commands.run('cat', { background: true, stdin: true })
    const ended = cat.wait().then(() => 'it ended', (e) => e)
    let screen = ''
    const terminal = await sbx.pty.create({ cols: 77, rows: 33, timeoutMs: 0, onData: (d) => { screen += new TextDecoder().decode(d) } })
    await sbx.pty.sendInput(terminal.pid, new TextEncoder().encode('word=kept\n'))
    await until('the shell has it', () => screen.includes('word=kept'))
    await sbx.pause()
    const error = await ended
    assert.ok(error instanceof Error, `the stream of the command returned ${error}`)
    await sbx.connect()
    let seen = ''
    await sbx.commands.connect(cat.pid, { onStdout: (d) => { seen += d } })
    await sbx.commands.sendStdin(cat.pid, 'ping\n')
    await until('the echo', () => seen === 'ping\n')
    let later = ''
    await sbx.pty.connect(terminal.pid, { onData: (d) => { later += new TextDecoder().decode(d) } })
    await sbx.pty.sendInput(terminal.pid, new TextEncoder().encode('echo "$word" $(stty size)\n'))
    await until('the shell knows the word', () => later.includes('kept 33 77'))
    await sbx.kill()
  })
  test('a killed paused sandbox is gone', async () => {
    const sbx = await Sandbox.create({ timeoutMs: 300_000 })
    await sbx.pause()
    assert.equal(await sbx.kill(), true)
    await assert.rejects(Sandbox.connect(sbx.sandboxId), NotFoundError)
  })
})

describe('the end of the time', () => {
  test('autoPause: it is paused with its state', async () => {
    const sbx = await serving({ lifecycle: { onTimeout: 'pause' } })
    const before = Number((await get(sbx, 8080)).body)
    await sbx.setTimeout(1000)
    await until('it is paused', async () => (await sbx.getInfo()).state === 'paused')
    assert.equal((await get(sbx, 8080)).status, 502)
    await sbx.connect({ timeoutMs: 60_000 })
    assert.equal(Number((await get(sbx, 8080)).body), before + 1)
    await sbx.kill()
  })
  test('autoResume: many requests at once wake it, once', async () => {
    const sbx = await serving({ lifecycle: { onTimeout: 'pause', autoResume: true } })
    const before = Number((await get(sbx, 8080)).body)
    await sbx.setTimeout(1000)
    await until('it is paused', async () => (await sbx.getInfo()).state === 'paused')
    const answers = await Promise.all(Array.from({ length: 20 }, () => get(sbx, 8080)))
    assert.deepEqual(answers.map((a) => a.status), Array(20).fill(200))
    assert.deepEqual(answers.map((a) => Number(a.body)).sort((a, b) => a - b), Array.from({ length: 20 }, (_, i) => before + 1 + i))
    assert.equal((await sbx.getInfo()).state, 'running')
    await sbx.kill()
  })
})
