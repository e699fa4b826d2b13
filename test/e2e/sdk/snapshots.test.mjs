// Snapshots, forks, pauses and what wakes from them, through the unmodified E2B SDK.
import test, { after, before, describe } from 'node:test'
import assert from 'node:assert/strict'
import { NotFoundError, Sandbox } from 'e2b'

const until = async (what, probe, ms = 120_000) => {
  for (const end = Date.now() + ms; Date.now() < end; ) {
    const got = await probe()
    if (got) return got
    await new Promise((r) => setTimeout(r, 20))
  }
  assert.fail(`${what}: not within ${ms} ms`)
}

// A program that keeps its count in memory alone, and returns it with its identity.
const counter = `
import http.server, os, threading, time
n = 0
def count():
    global n
    while True:
        n += 1
        time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.getpid()} {n}".encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), H).serve_forever()
`
const start = async (sbx) => {
  await sbx.files.write('/home/user/counter.py', counter)
  await sbx.commands.run('python3 counter.py', { background: true, timeoutMs: 0 })
  return until('the counter', () => query(sbx))
}
// By curl inside, so that it is the program that answers and not a way to it.
const query = async (sbx) => {
  const res = await sbx.commands.run('curl -s 127.0.0.1:8000 || true')
  const [pid, n] = res.stdout.split(' ').map(Number)
  return n ? { pid, n } : undefined
}
const all = async (opts) => {
  const pages = Sandbox.listSnapshots(opts)
  const ids = []
  while (pages.hasNext) ids.push(...(await pages.nextItems()).map((s) => s.snapshotId))
  return ids
}

describe('snapshots', () => {
  let sbx, first
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 600_000, metadata: { suite: 'snapshots' } })
    first = await start(sbx)
  })
  after(async () => { await sbx?.kill() })

  test('the source continues, and another starts from it with its own identity', async () => {
    const snap = await sbx.createSnapshot({ name: 'counted' })
    assert.match(snap.snapshotId, /^counted:[a-z0-9]+$/)
    assert.deepEqual(snap.names.map((n) => n.endsWith(`/${snap.snapshotId}`)), [true])
    const now = await query(sbx)
    assert.equal(now.pid, first.pid)
    assert.ok(now.n > first.n, `${now.n} after ${first.n}`)

    const copy = await Sandbox.create(snap.snapshotId, { timeoutMs: 600_000, metadata: { copy: 'yes' } })
    try {
      assert.notEqual(copy.sandboxId, sbx.sandboxId)
      const there = await query(copy)
      assert.equal(there.pid, first.pid)
      assert.ok(there.n > first.n, `${there.n} is no more than ${first.n}, which it counted to before`)
      await copy.files.write('/home/user/only-here', 'x')
      assert.equal(await sbx.files.exists('/home/user/only-here'), false)
      const [a, b] = await Promise.all([sbx, copy].map((s) => s.commands.run('hostname -I')))
      assert.notEqual(a.stdout, b.stdout)
      assert.deepEqual((await copy.getInfo()).metadata, { copy: 'yes' })
      assert.equal((await copy.getInfo()).templateId, (await sbx.getInfo()).templateId)
    } finally {
      await copy.kill()
    }
    const byName = await Sandbox.create('counted', { timeoutMs: 600_000 })
    assert.equal((await query(byName)).pid, first.pid)
    await byName.kill()
    assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), false)
    await assert.rejects(Sandbox.create(snap.snapshotId), /404: template/)
  })

  test('lists', async () => {
    const other = await Sandbox.create({ timeoutMs: 600_000 })
    const made = [await sbx.createSnapshot({ name: 'listed:v1' }), await sbx.createSnapshot(), await Sandbox.createSnapshot(other.sandboxId)]
    const ids = made.map((s) => s.snapshotId)
    assert.deepEqual((await all()).sort(), [...ids].sort())
    assert.deepEqual((await all({ limit: 1 })).sort(), [...ids].sort())
    assert.deepEqual((await all({ sandboxId: sbx.sandboxId })).sort(), ids.slice(0, 2).sort())
    assert.deepEqual(await all({ name: 'listed' }), ['listed:v1'])
    assert.deepEqual(await all({ name: 'listed:v1' }), ['listed:v1'])
    await other.kill()
    assert.deepEqual(await all({ sandboxId: other.sandboxId }), ids.slice(2)) // it outlives its source
    for (const id of ids) assert.equal(await Sandbox.deleteSnapshot(id), true)
    assert.deepEqual(await all(), [])
  })

  test('of a paused sandbox, which stays paused', async () => {
    const paused = await Sandbox.create({ timeoutMs: 600_000 })
    const before = await start(paused)
    await paused.pause()
    const snap = await paused.createSnapshot()
    assert.equal((await paused.getInfo()).state, 'paused')
    const copy = await Sandbox.create(snap.snapshotId, { timeoutMs: 600_000 })
    assert.equal((await query(copy)).pid, before.pid)
    await paused.kill()
    await Promise.all([copy.kill(), Sandbox.deleteSnapshot(snap.snapshotId)])
  })

  test('refusals', async () => {
    await assert.rejects(sbx.createSnapshot({ name: 'Not A Name' }), /400: name: "Not A Name"/)
    await assert.rejects(Sandbox.createSnapshot('i0000000000000000000'), NotFoundError)
    assert.equal(await Sandbox.deleteSnapshot('unknown/nothing:here'), false)
  })
})

describe('forks', () => {
  let sbx
  before(async () => { sbx = await Sandbox.create({ timeoutMs: 600_000 }) })
  after(async () => { await sbx?.kill() })

  test('five at once, each itself', async () => {
    const first = await start(sbx)
    const end = (await sbx.getInfo()).endAt
    const forks = await sbx.fork({ count: 5, timeoutMs: 120_000 })
    assert.equal(forks.length, 5)
    for (const f of forks) assert.ok(f instanceof Sandbox, String(f))
    assert.equal(new Set(forks.map((f) => f.sandboxId)).size, 5)
    const seen = await Promise.all(forks.map(query))
    for (const { pid, n } of seen) {
      assert.equal(pid, first.pid)
      assert.ok(n > first.n)
    }
    const boots = await Promise.all([sbx, ...forks].map((f) => f.commands.run('cat /proc/sys/kernel/random/boot_id')))
    assert.equal(new Set(boots.map((b) => b.stdout)).size, 6, 'boot_id is shared')
    const addresses = await Promise.all([sbx, ...forks].map((f) => f.commands.run('hostname -I')))
    assert.equal(new Set(addresses.map((b) => b.stdout)).size, 6, 'an address is shared')
    assert.equal((await sbx.getInfo()).endAt.getTime(), end.getTime())
    assert.equal((await query(sbx)).pid, first.pid)
    await Promise.all(forks.map((f) => f.kill()))
    assert.deepEqual(await all(), []) // what a fork needs is not listed, and goes
  })
  test('one, by the class', async () => {
    const [fork] = await Sandbox.fork(sbx.sandboxId)
    assert.ok(fork instanceof Sandbox, String(fork))
    await fork.kill()
  })
  test('refusals', async () => {
    await assert.rejects(Sandbox.fork(sbx.sandboxId, { count: 101 }), /400: count/)
    await assert.rejects(Sandbox.fork('i0000000000000000000'), NotFoundError)
    const paused = await Sandbox.create({ timeoutMs: 600_000 })
    await paused.pause()
    await assert.rejects(paused.fork(), /409: .*paused/)
    await paused.kill()
  })
  test('one that was created with variables, which forks and copies have too', async () => {
    const owner = await Sandbox.create({ timeoutMs: 600_000, envs: { TOKEN: 's3cret' } })
    const [fork] = await owner.fork()
    const snap = await owner.createSnapshot({ name: 'with_variables' })
    assert.match(snap.snapshotId, /^with_variables:/)
    const copy = await Sandbox.create(snap.snapshotId, { envs: { MORE: 'yes' } })
    assert.equal((await fork.commands.run('echo $TOKEN')).stdout, 's3cret\n')
    assert.equal((await copy.commands.run('echo $TOKEN $MORE')).stdout, 's3cret yes\n')
    await Promise.all([owner, fork, copy].map((s) => s.kill()))
    await Sandbox.deleteSnapshot(snap.snapshotId)
  })
})

describe('sleep', () => {
  test('pause and connect: memory, then files only', async () => {
    const sbx = await Sandbox.create({ timeoutMs: 600_000 })
    const before = await start(sbx)
    assert.equal(await sbx.pause(), true)
    assert.equal(await sbx.pause(), false)
    assert.equal(await sbx.isRunning(), false)
    await sbx.connect({ timeoutMs: 600_000 })
    const after = await query(sbx)
    assert.equal(after.pid, before.pid)
    assert.ok(after.n >= before.n)
    await sbx.files.write('/home/user/kept', 'yes')
    assert.equal(await sbx.pause({ keepMemory: false }), true)
    await sbx.connect({ timeoutMs: 600_000 })
    assert.equal(await sbx.files.read('/home/user/kept'), 'yes')
    assert.equal(await query(sbx), undefined)
    await sbx.kill()
  })
  test('a resume may give the memory up', async () => {
    const sbx = await Sandbox.create({ timeoutMs: 600_000 })
    await start(sbx)
    await sbx.files.write('/home/user/kept', 'yes')
    await sbx.pause()
    await Sandbox.connect(sbx.sandboxId, { timeoutMs: 600_000, onResume: 'reboot' })
    assert.equal(await sbx.files.read('/home/user/kept'), 'yes')
    await sbx.kill()
  })
  test('autoPause, and traffic wakes it', async () => {
    const sbx = await Sandbox.create({ timeoutMs: 600_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
    await sbx.files.write('/home/user/kept', 'yes')
    await sbx.setTimeout(1000) // not before, for a write that comes later would wake it for minutes
    await until('it is paused', async () => (await sbx.getInfo()).state === 'paused')
    assert.equal(await sbx.files.read('/home/user/kept'), 'yes')
    assert.equal((await sbx.getInfo()).state, 'running')
    await sbx.kill()
  })
})
