// Drives the unmodified SDK against a server that has only a stand-in behind it: what the
// control plane answers, and what the SDK makes of it. Usage: node sdk.mjs <path of e2b's index.mjs>
import assert from 'node:assert/strict'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'

const e2b = await import(pathToFileURL(process.argv[2]))
const { Sandbox, Template } = e2b
const soon = (date, seconds, what) =>
  assert.ok(Math.abs(date.getTime() - Date.now() - seconds * 1000) < 5000, `${what}: ends at ${date.toISOString()}`)

const all = async (opts) => {
  const pages = Sandbox.list(opts)
  const items = []
  let count = 0
  while (pages.hasNext) {
    items.push(...(await pages.nextItems()))
    count++
  }
  return { items, count }
}

// Create, and what it is like.
const odd = { 'a & b': 'ü = %2F +?', plain: 'x' }
const first = await Sandbox.create('base', { metadata: odd, envs: { A: 'b' }, timeoutMs: 120_000 })
assert.match(first.sandboxId, /^[a-z0-9]{20}$/)
assert.equal(await first.isRunning(), true)
let info = await first.getInfo()
assert.equal(info.state, 'running')
assert.deepEqual(info.metadata, odd)
assert.equal(info.name, 'base')
soon(info.endAt, 120, 'create')
const standard = await Sandbox.create()
soon((await standard.getInfo()).endAt, 300, 'default')

// Timeouts.
await first.setTimeout(30_000)
soon((await first.getInfo()).endAt, 30, 'setTimeout')
const again = await Sandbox.connect(first.sandboxId, { timeoutMs: 60_000 })
assert.equal(again.sandboxId, first.sandboxId)
soon((await first.getInfo()).endAt, 60, 'connect extends')
await Sandbox.connect(first.sandboxId, { timeoutMs: 10_000 })
soon((await first.getInfo()).endAt, 60, 'connect never shortens')
await assert.rejects(first.setTimeout(25 * 3600_000), /Timeout cannot be greater than 24 hours/)
const brief = await Sandbox.create('base')
await brief.setTimeout(0)
soon((await brief.getInfo()).endAt, 0, 'no time left')
await brief.kill()

// A domain that the server tells of names hosts, and E2B_SANDBOX_URL goes before it.
assert.equal(first.getHost(3000), `3000-${first.sandboxId}.sandboxes.example:7743`)

// Pause and resume.
const pause = (s) => (s.pause ?? s.betaPause).call(s)
assert.notEqual(await pause(first), false)
assert.equal(await first.isRunning(), false)
assert.equal((await first.getInfo()).state, 'paused')
assert.equal(await pause(first), false)
const resumed = await Sandbox.connect(first.sandboxId)
assert.equal(await resumed.isRunning(), true)
assert.equal(await first.isRunning(), true)
assert.deepEqual((await resumed.getInfo()).metadata, odd)

// A sandbox that sleeps instead of dying.
const sleepy = await Sandbox.create('base', {
  lifecycle: { onTimeout: 'pause', autoResume: true },
  network: { allowPublicTraffic: false, denyOut: ['0.0.0.0/0'], allowOut: ['example.com', '1.1.1.1'] },
})
assert.match(sleepy.trafficAccessToken, /^[0-9a-f]{64}$/)
info = await sleepy.getInfo()
assert.deepEqual(info.lifecycle, { onTimeout: 'pause', autoResume: true })
assert.deepEqual(info.network.allowOut, ['example.com', '1.1.1.1'])
assert.equal(info.network.allowPublicTraffic, false)
await sleepy.updateNetwork?.({ denyOut: ['10.0.0.0/8'] })
if (sleepy.updateNetwork) assert.equal((await sleepy.getInfo()).network.allowOut, undefined)
const closed = await Sandbox.create('base', { allowInternetAccess: false })
assert.equal((await closed.getInfo()).allowInternetAccess, false)

// Lists.
for (let i = 0; i < 3; i++) await Sandbox.create('base', { metadata: { batch: 'x', n: `${i}` } })
let list = await all({ query: { metadata: { batch: 'x' } }, limit: 2 })
assert.deepEqual([list.items.length, list.count], [3, 2])
list = await all({ query: { metadata: odd } })
assert.deepEqual(list.items.map((s) => s.sandboxId), [first.sandboxId])
await pause(first)
list = await all({ query: { state: ['paused'] } })
assert.deepEqual(list.items.map((s) => [s.sandboxId, s.state]), [[first.sandboxId, 'paused']])
assert.equal((await all({ query: { state: ['running', 'paused'] } })).items.length, 7)
const other = { apiKey: process.env.OTHER_API_KEY }
assert.equal((await all(other)).items.length, 0)

// Snapshots and forks, where the SDK knows of them.
if (standard.fork) {
  const kept = []
  for (const name of ['kept:v1', undefined]) kept.push(await standard.createSnapshot({ name }))
  assert.equal(kept[0].snapshotId, 'kept:v1')
  assert.deepEqual(kept[0].names, ['team-a/kept:v1'])
  assert.match(kept[1].snapshotId, /^base:[a-z0-9]+$/)
  const pages = Sandbox.listSnapshots({ sandboxId: standard.sandboxId, limit: 1 })
  const listed = []
  while (pages.hasNext) listed.push(...(await pages.nextItems()).map((s) => s.snapshotId))
  assert.deepEqual(listed.sort(), kept.map((s) => s.snapshotId).sort())
  const copy = await Sandbox.create('kept', { timeoutMs: 60_000 })
  assert.equal((await copy.getInfo()).templateId, (await standard.getInfo()).templateId)
  await copy.kill()
  const forks = await standard.fork({ count: 3, timeoutMs: 60_000 })
  assert.equal(new Set(forks.map((f) => f.sandboxId)).size, 3)
  for (const f of forks) {
    assert.equal(await f.isRunning(), true)
    soon((await f.getInfo()).endAt, 60, 'fork')
    await f.kill()
  }
  await assert.rejects(first.fork({ count: 101 }), /count: must be from 1 to 100/)
  await assert.rejects(Sandbox.createSnapshot(first.sandboxId, { apiKey: process.env.OTHER_API_KEY }), e2b.NotFoundError)
  const secret = await Sandbox.create('base', { envs: { A: 'b' } })
  const [like] = await secret.fork()
  const { snapshotId } = await like.createSnapshot({ name: 'with_variables' })
  assert.match(snapshotId, /^with_variables:/)
  for (const s of [like, await Sandbox.create(snapshotId, { envs: { B: 'c' } })]) await s.kill()
  await Sandbox.deleteSnapshot(snapshotId)
  await secret.kill()
  assert.equal(await Sandbox.deleteSnapshot('team-a/kept:v1'), true)
  assert.equal(await Sandbox.deleteSnapshot('kept:v1'), false)
  assert.equal(await Sandbox.deleteSnapshot(kept[1].snapshotId), true)
  await assert.rejects(Sandbox.deleteSnapshot('base'), /403: .*its operator changes and deletes it/)
  await assert.rejects(first.fork(), /409: .*paused/)
  await first.connect({ onResume: 'reboot' })
}

// Metrics, templates.
assert.ok((await standard.getMetrics()).length >= 1)
if (Template.exists) {
  assert.equal(await Template.exists('base'), true)
  assert.equal(await Template.exists('nope'), false)
}

// Errors as the SDK understands them.
const missing = e2b.SandboxNotFoundError ?? e2b.NotFoundError
await assert.rejects(Sandbox.create('nope'), /404: template 'nope' not found/)
await assert.rejects(Sandbox.create('broken'), /400: .*the image cannot be used/)
await assert.rejects(Sandbox.create('base', { apiKey: 'e2b_00' }), e2b.AuthenticationError)
await assert.rejects(Sandbox.connect(standard.sandboxId, other), missing)
await assert.rejects(Sandbox.getInfo(standard.sandboxId, other), missing)
await assert.rejects(Sandbox.setTimeout('nonsense', 1000), missing)
await assert.rejects(Sandbox.create('base', { network: { allowOut: ['example.com'] } }), /network\.allowOut\[0\]/)
assert.equal(await Sandbox.kill(standard.sandboxId, other), false)

// Kill, also of a paused one.
assert.notEqual(await standard.kill(), false)
assert.equal(await standard.isRunning(), false)
assert.equal(await Sandbox.kill(standard.sandboxId), false)
await assert.rejects(Sandbox.connect(standard.sandboxId), missing)
await assert.rejects(standard.getInfo(), missing)
assert.equal(await Sandbox.kill(first.sandboxId), true)
assert.equal(await Sandbox.kill(`${sleepy.sandboxId}-client`), true)

// Many at once.
const many = await Promise.all(Array.from({ length: 20 }, () => Sandbox.create('base')))
assert.equal(new Set(many.map((s) => s.sandboxId)).size, 20)
assert.deepEqual(await Promise.all(many.map((s) => Sandbox.kill(s.sandboxId))), Array(20).fill(true))
await sleep(0)
console.log('ok')
process.exit(0)
