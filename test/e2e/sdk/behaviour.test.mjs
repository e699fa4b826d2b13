// Details that programs written for E2B rely on, through its unmodified SDK.
import test, { after, before, describe } from 'node:test'
import assert from 'node:assert/strict'
import { FileType, NotFoundError, Sandbox, Template } from 'e2b'
import { machineOnly, rpc, until } from './lib.mjs'

describe('one sandbox', () => {
  let sbx
  before(async () => { sbx = await Sandbox.create('base', { timeoutMs: 300_000 }) })
  after(async () => { await sbx?.kill() })

  test('a symlink has the type and the mode of its target', async () => {
    await sbx.files.write('links/file', 'four')
    await sbx.commands.run('cd links && chmod 640 file && mkdir -p dir && chmod 750 dir && ln -s file to-file && ln -s dir to-dir && ln -s nothing dangling')
    const byName = Object.fromEntries((await sbx.files.list('links')).map((e) => [e.name, e]))
    for (const [name, type, mode, target] of [['to-file', FileType.FILE, 0o640, 'file'], ['to-dir', FileType.DIR, 0o750, 'dir']]) {
      for (const e of [byName[name], await sbx.files.getInfo(`links/${name}`)]) {
        assert.equal(e.type, type, name)
        assert.equal(e.mode, mode, name)
        assert.equal(e.symlinkTarget, `/home/user/links/${target}`)
      }
    }
    assert.ok(byName.dangling.symlinkTarget.endsWith('nothing'), JSON.stringify(byName.dangling))
    assert.equal(byName.file.symlinkTarget, undefined)
  })

  test('a watcher reports a change of mode', async () => {
    await sbx.files.write('watched/file', 'x')
    const seen = []
    const watcher = await sbx.files.watchDir('watched', (e) => { seen.push(`${e.type} ${e.name}`) })
    await sbx.commands.run('chmod 600 watched/file')
    await until('chmod', () => seen.includes('chmod file'))
    await watcher.stop()
  })

  test('a polled watcher has what happened before the call', async () => {
    await sbx.commands.run('mkdir -p polled')
    const { watcherId } = await rpc(sbx, 'filesystem.Filesystem/CreateWatcher', { path: 'polled', recursive: false })
    await sbx.commands.run('echo 1 > polled/file; chmod 600 polled/file; mv polled/file polled/other; rm polled/other')
    const { events = [] } = await rpc(sbx, 'filesystem.Filesystem/GetWatcherEvents', { watcherId })
    const got = events.map((e) => `${e.type.replace('EVENT_TYPE_', '').toLowerCase()} ${e.name}`)
    for (const want of ['create file', 'write file', 'chmod file', 'rename file', 'create other', 'remove other']) assert.ok(got.includes(want), `${want} is not in ${got}`)
    assert.deepEqual((await rpc(sbx, 'filesystem.Filesystem/GetWatcherEvents', { watcherId })).events ?? [], [])
    await rpc(sbx, 'filesystem.Filesystem/RemoveWatcher', { watcherId })
  })

  test('an expired signature is refused with the reason', async () => {
    await sbx.files.write('signed.txt', 'x')
    assert.equal((await fetch(await sbx.downloadUrl('signed.txt', { useSignatureExpiration: 60 }))).status, 200)
    const res = await fetch(await sbx.downloadUrl('signed.txt', { useSignatureExpiration: -60 }))
    assert.equal(res.status, 401)
    assert.deepEqual(await res.json(), { code: 401, message: 'signature is already expired' })
  })

  test('names may have underscores', machineOnly, async () => {
    assert.equal(await Template.exists('no_such_template'), false)
    await assert.rejects(Sandbox.create('no_such_template'), /template 'no_such_template' not found/)
    const snap = await sbx.createSnapshot({ name: 'with_under_scores' })
    assert.match(snap.snapshotId, /^with_under_scores:/)
    const other = await Sandbox.create(snap.snapshotId)
    await other.kill()
    assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), true)
  })
})

test('lists are newest first, over pages', async () => {
  const all = []
  try {
    for (let n = 0; n < 6; n++) all.unshift((await Sandbox.create('base', { metadata: { suite: 'order' } })).sandboxId)
    for (const limit of [1, 2, 4, 100]) {
      const pages = Sandbox.list({ query: { metadata: { suite: 'order' } }, limit })
      const got = []
      while (pages.hasNext) got.push(...(await pages.nextItems()).map((s) => s.sandboxId))
      assert.deepEqual(got, all, `pages of ${limit}`)
    }
  } finally {
    await Promise.all(all.map((id) => Sandbox.kill(id)))
  }
})

test('a timeout of zero, or less, ends the sandbox now', async () => {
  for (const ms of [0, -5000]) {
    const sbx = await Sandbox.create('base')
    await sbx.setTimeout(ms)
    await until('the end', async () => !(await sbx.isRunning()))
    await assert.rejects(sbx.getInfo(), NotFoundError)
  }
})

test('what was created with envs can be copied, and the copies have them', machineOnly, async () => {
  const sbx = await Sandbox.create('base', { envs: { GREETING: 'hello' }, timeoutMs: 300_000 })
  const copies = []
  try {
    const snap = await sbx.createSnapshot()
    copies.push(await Sandbox.create(snap.snapshotId))
    for (const fork of await sbx.fork({ count: 2 })) {
      assert.ok(fork instanceof Sandbox, String(fork))
      copies.push(fork)
    }
    for (const c of copies) assert.equal((await c.commands.run('echo $GREETING')).stdout, 'hello\n')
    assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), true)
  } finally {
    await Promise.all([sbx, ...copies].map((s) => s.kill()))
  }
})
