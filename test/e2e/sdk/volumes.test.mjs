// Volumes through the unmodified E2B SDK: their objects, their files, and sandboxes that share them.
// PART=after is run by a server that was restarted since.
import test, { after, before, describe } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox, Volume, VolumeError, VolumeNotFoundError, VolumePathNotFoundError } from 'e2b'
import { until } from './lib.mjs'

const text = async (stream) => new Response(stream).text()
const mounted = (volumeMounts, opts) => Sandbox.create({ volumeMounts, timeoutMs: 600_000, ...opts })
const run = async (sbx, line, opts) => (await sbx.commands.run(line, opts)).stdout
const refused = (promise, kind, message) => assert.rejects(promise, (err) => {
  assert.ok(err instanceof kind, `${err.constructor.name}: ${err.message}`)
  assert.match(err.message, message)
  return true
})

if (process.env.PART === 'after') {
  test('everything is there after a restart', async () => {
    const info = (await Volume.list()).find((v) => v.name === 'Kept_One')
    const volume = await Volume.connect(info.volumeId)
    assert.equal(await volume.readFile('/kept'), 'kept')
    const sbx = await Sandbox.connect(process.env.SANDBOX)
    assert.equal(await run(sbx, 'cat /mnt/kept/kept'), 'kept')
    await sbx.files.write('/mnt/kept/later', 'later')
    assert.equal(await volume.readFile('later'), 'later')
    const other = await mounted({ '/data': 'Kept_One' })
    assert.equal(await run(other, 'cat /data/later'), 'later')
    await Promise.all([sbx.kill(), other.kill()])
    assert.equal(await Volume.destroy(volume.volumeId), true)
  })
} else {
  describe('a volume', () => {
    test('is created, shown and destroyed', async () => {
      assert.deepEqual(await Volume.list(), [])
      const volume = await Volume.create('first')
      assert.match(volume.volumeId, /^v[a-z0-9]{19}$/)
      assert.ok(volume.token)
      assert.deepEqual(await Volume.list(), [{ volumeId: volume.volumeId, name: 'first' }])
      const info = await Volume.getInfo(volume.volumeId)
      assert.deepEqual([info.name, info.token], ['first', volume.token])
      assert.equal((await Volume.connect(volume.volumeId)).name, 'first')
      await refused(Volume.create('first'), VolumeError, /400: Volume with name 'first' already exists/)
      for (const name of ['', 'a b', '../x', 'x'.repeat(129)]) await refused(Volume.create(name), VolumeError, /400: name: /)
      assert.equal(await Volume.destroy(volume.volumeId), true)
      assert.equal(await Volume.destroy(volume.volumeId), false)
      await refused(Volume.getInfo(volume.volumeId), VolumeNotFoundError, /not found/)
      await refused(volume.readFile('/x'), VolumePathNotFoundError, /not found/)
      const again = await Volume.create('first')
      assert.notEqual(again.volumeId, volume.volumeId)
      await refused(again.list('/', { token: volume.token }), Error, /token/)
      await Volume.destroy(again.volumeId)
    })
  })

  describe('files without a sandbox', () => {
    let volume
    before(async () => { volume = await Volume.create('files') })
    after(() => Volume.destroy(volume.volumeId))

    test('are written and read in every format', async () => {
      const e = await volume.writeFile('/a.txt', 'héllo')
      assert.deepEqual([e.name, e.path, e.type, e.size, e.mode], ['a.txt', '/a.txt', 'file', 6, 0o666])
      for (const at of ['atime', 'mtime', 'ctime']) assert.ok(Math.abs(e[at] - Date.now()) < 60_000, `${at}: ${e[at]}`)
      assert.equal(await volume.readFile('a.txt'), 'héllo')
      assert.deepEqual(await volume.readFile('/a.txt', { format: 'bytes' }), new TextEncoder().encode('héllo'))
      assert.equal(await (await volume.readFile('/a.txt', { format: 'blob' })).text(), 'héllo')
      assert.equal(await text(await volume.readFile('/a.txt', { format: 'stream' })), 'héllo')
      await volume.writeFile('/empty', '')
      assert.equal(await volume.readFile('/empty'), '')
      assert.equal((await volume.readFile('/empty', { format: 'bytes' })).length, 0)
      await volume.writeFile('/bytes', new Uint8Array([0, 255]).buffer)
      await volume.writeFile('/blob', new Blob(['blob']))
      assert.equal(await volume.readFile('/blob'), 'blob')
      const big = new Uint8Array(3 << 20).fill(7)
      await volume.writeFile('/stream', new ReadableStream({ start(c) { c.enqueue(big); c.enqueue(big); c.close() } }))
      assert.equal((await volume.getInfo('/stream')).size, 6 << 20)
      assert.equal(Buffer.compare(Buffer.from(await volume.readFile('/stream', { format: 'bytes' })), Buffer.concat([big, big])), 0)
    })
    test('are replaced by force alone, and get owners and modes', async () => {
      await volume.writeFile('/once', '1')
      await refused(volume.writeFile('/once', '2'), VolumeError, /409: path: "\/once" exists/)
      assert.equal(await volume.readFile('/once'), '1')
      await volume.writeFile('/once', '2', { force: true, uid: 1234, gid: 60, mode: 0o640 })
      const { uid, gid, mode } = await volume.getInfo('/once')
      assert.deepEqual([uid, gid, mode], [1234, 60, 0o640])
      const e = await volume.updateMetadata('/once', { uid: 1, mode: 0o755 })
      assert.deepEqual([e.uid, e.gid, e.mode], [1, 60, 0o755])
      await refused(volume.updateMetadata('/once', { mode: 0o4755 }), VolumeError, /400: mode: /)
      await refused(volume.updateMetadata('/none', { mode: 0o755 }), VolumePathNotFoundError, /not found/)
    })
    test('lie in directories', async () => {
      await refused(volume.makeDir('/d/e/f'), VolumePathNotFoundError, /not found/)
      assert.equal((await volume.makeDir('/d/e/f', { force: true, mode: 0o700 })).mode, 0o700)
      assert.equal((await volume.makeDir('/d', { force: true })).type, 'directory')
      await refused(volume.makeDir('/d'), VolumeError, /409: /)
      await refused(volume.writeFile('/no/parent', 'x'), VolumePathNotFoundError, /not found/)
      await volume.writeFile('/d/g/h', 'x', { force: true })
      const paths = async (...args) => (await volume.list(...args)).map((x) => x.path).sort()
      assert.deepEqual(await paths('/d'), ['/d/e', '/d/g'])
      assert.deepEqual(await paths('d', { depth: 10 }), ['/d/e', '/d/e/f', '/d/g', '/d/g/h'])
      await refused(volume.list('/d', { depth: 11 }), VolumeError, /400: depth: /)
      await refused(volume.list('/none'), VolumePathNotFoundError, /not found/)
      await refused(volume.list('/d/g/h'), VolumeError, /not a directory/)
      assert.equal(await volume.exists('/d/g/h'), true)
      await volume.remove('/d/g/h')
      assert.equal(await volume.exists('/d/g/h'), false)
      await volume.remove('/d')
      await refused(volume.remove('/d'), VolumePathNotFoundError, /not found/)
      await refused(volume.remove('/'), VolumeError, /400: path: /)
    })
    test('stay in the volume', async () => {
      await volume.writeFile('/../../../etc/hostname', 'mine', { force: true })
      assert.equal(await volume.readFile('/etc/hostname'), 'mine')
    })
  })

  describe('sandboxes', () => {
    test('share a volume, and see what the other writes', async () => {
      const volume = await Volume.create('shared')
      const [a, b] = await Promise.all([mounted({ '/mnt/a': volume }), mounted({ '/mnt/b': 'shared', '/home/user/too': volume })])
      assert.deepEqual((await a.getInfo()).volumeMounts, [{ name: 'shared', path: '/mnt/a' }])
      assert.equal((await b.getInfo()).volumeMounts.length, 2)
      const shown = []
      for (const pages = Sandbox.list(); pages.hasNext; ) shown.push(...await pages.nextItems())
      assert.deepEqual(shown.find((s) => s.sandboxId === a.sandboxId).volumeMounts, [{ name: 'shared', path: '/mnt/a' }])

      await volume.writeFile('/from-outside', 'outside')
      assert.equal(await run(a, 'cat /mnt/a/from-outside'), 'outside')
      await run(a, 'echo 1 > /mnt/a/f; id -un > /mnt/a/who')
      assert.equal(await run(b, 'cat /mnt/b/f /home/user/too/who'), '1\nuser\n')
      // A file that both know changes, also in size, and also beneath an open descriptor.
      await run(b, 'exec 3< /mnt/b/f; cat <&3 > /tmp/begun; for i in $(seq 600); do sleep 0.1; cat <&3; done > /tmp/seen', { background: true })
      await until('the reader has begun', async () => (await run(b, 'cat /tmp/begun 2>/dev/null || true')) === '1\n')
      await run(a, 'echo 22 >> /mnt/a/f')
      assert.equal(await run(b, 'cat /mnt/b/f'), '1\n22\n')
      await until('the reader sees what was appended', async () => (await run(b, 'cat /tmp/seen')) === '22\n')
      await run(a, 'echo new > /mnt/a/g; mv /mnt/a/g /mnt/a/f; mkdir /mnt/a/d; echo x > /mnt/a/d/x')
      assert.equal(await run(b, 'cat /mnt/b/f /mnt/b/d/x; ls /mnt/b'), 'new\nx\nd\nf\nfrom-outside\nwho\n')
      await run(b, 'rm -r /mnt/b/d')
      assert.equal(await run(a, 'ls /mnt/a'), 'f\nfrom-outside\nwho\n')
      await volume.writeFile('/f', 'replaced', { force: true })
      assert.equal(await run(a, 'cat /mnt/a/f') + await run(b, 'cat /mnt/b/f'), 'replacedreplaced')

      // Both write at once, each to a file of its own: gVisor does not keep appends of two sandboxes to one file apart.
      const line = (who) => `for i in $(seq 200); do echo ${who}$i >> log-${who}; done`
      await Promise.all([run(a, line('a'), { cwd: '/mnt/a' }), run(b, line('b'), { cwd: '/mnt/b' })])
      const lines = (await volume.readFile('/log-a') + await volume.readFile('/log-b')).trim().split('\n')
      assert.equal(new Set(lines).size, 400, 'lines were lost')

      await Promise.all([a.kill(), b.kill()])
      assert.equal(await volume.readFile('/who'), 'user\n')
      await Volume.destroy(volume.volumeId)
    })

    test('keep a volume that is destroyed until they end', async () => {
      const volume = await Volume.create('in-use')
      await volume.writeFile('/f', 'still')
      const sbx = await mounted({ '/v': volume })
      assert.equal(await Volume.destroy(volume.volumeId), true)
      assert.equal((await Volume.list()).some((v) => v.name === 'in-use'), false)
      await refused(mounted({ '/v': 'in-use' }), Error, /volumeMounts\[0\].name: volume 'in-use' not found/)
      await refused(Volume.create('in-use'), VolumeError, /is being deleted: .*no longer mount/)
      assert.equal(await run(sbx, 'cat /v/f'), 'still')
      await sbx.kill()
      await until('the name is free', () => Volume.create('in-use').catch(() => null))
      const again = (await Volume.list()).find((v) => v.name === 'in-use')
      assert.deepEqual(await (await Volume.connect(again.volumeId)).list('/'), [])
      await Volume.destroy(again.volumeId)
    })

    test('find a volume again after a pause, and in forks and snapshots', async () => {
      const volume = await Volume.create('memory')
      const sbx = await mounted({ '/v': volume })
      await run(sbx, 'echo before > /v/f; exec 3>> /v/f; echo $$ > /tmp/pid; for i in $(seq 6000); do sleep 0.05; test -e /tmp/go && echo after >&3 && break; done', { background: true })
      await until('the file', () => volume.exists('/f'))
      await sbx.pause()
      await until('the memory is on disk', async () => {
        const r = await fetch(`${process.env.E2B_API_URL}/sandboxes/${sbx.sandboxId}`, { headers: { 'X-API-Key': process.env.E2B_API_KEY } })
        return (await r.json()).memory === 'Disk'
      })
      await volume.writeFile('/meanwhile', 'written')
      await sbx.connect()
      assert.equal(await run(sbx, 'cat /v/meanwhile; touch /tmp/go'), 'written')
      await until('the open file is written', async () => (await volume.readFile('/f')) === 'before\nafter\n')

      const [fork] = await sbx.fork({ count: 1, timeoutMs: 600_000 })
      assert.deepEqual((await fork.getInfo()).volumeMounts, [{ name: 'memory', path: '/v' }])
      await run(fork, 'echo fork > /v/of-fork')
      assert.equal(await run(sbx, 'cat /v/of-fork'), 'fork\n')
      const snap = await sbx.createSnapshot()
      const copy = await Sandbox.create(snap.snapshotId, { timeoutMs: 600_000 })
      assert.equal(await run(copy, 'cat /v/of-fork'), 'fork\n')
      await refused(Sandbox.create(snap.snapshotId, { volumeMounts: { '/w': volume } }), Error, /volumeMounts: .*starts from memory/)
      await Promise.all([sbx, fork, copy].map((s) => s.kill()))
      await Volume.destroy(volume.volumeId)
      await refused(Sandbox.create(snap.snapshotId), Error, /the volume at \/v: volume 'memory' not found/)
      await Sandbox.deleteSnapshot(snap.snapshotId)
    })

    test('are refused what cannot be mounted', async () => {
      const volume = await Volume.create('refused')
      for (const [path, why] of [['/', /whole sandbox/], ['relative', /absolute/], ['/proc', /system's own/], ['/proc/self', /system's own/], ['/.barchan', /system's own/],
        ['/.barchan/agent', /system's own/], ['/dev/x', /system's own/], ['/a/../b', /must not have/], ['/a/', /must not have/]]) {
        await refused(mounted({ [path]: volume }), Error, new RegExp(`volumeMounts\\[0\\].path: .*${why.source}`))
      }
      await refused(mounted({ '/v': 'none' }), Error, /volumeMounts\[0\].name: volume 'none' not found/)
      await refused(mounted(Object.fromEntries(Array.from({ length: 17 }, (_, i) => [`/v${i}`, volume]))), Error, /at most 16/)
      await Volume.destroy(volume.volumeId)
    })

    test('cannot lead the server out of a volume', async () => {
      const volume = await Volume.create('hostile')
      const sbx = await mounted({ '/v': volume })
      await run(sbx, 'cd /v && ln -s /etc/passwd abs && ln -s ../../../../../../../etc/passwd up && ln -s /etc dir && ln -s loop loop && ln -s ok inside && echo fine > ok && mkdir -p x/y && ln -s /v/x/y self', { user: 'root' })
      for (const path of ['abs', 'up', 'dir/passwd', 'self/f']) {
        await refused(volume.readFile(path), VolumeError, /400: path: .*leads out/)
        if (path !== 'abs' && path !== 'up') await refused(volume.writeFile(path, 'x', { force: true }), VolumeError, /400: path: /)
      }
      await refused(volume.list('dir'), VolumeError, /leads out/)
      await refused(volume.updateMetadata('up', { mode: 0o777 }), VolumeError, /leads out/)
      await refused(volume.readFile('loop'), VolumeError, /400: path: .*links/)
      assert.equal(await volume.readFile('inside'), 'fine\n')
      const link = await volume.getInfo('up')
      assert.deepEqual([link.type, link.target], ['symlink', '../../../../../../../etc/passwd'])
      assert.equal((await volume.list('/', { depth: 10 })).some((e) => e.path.startsWith('/dir/')), false)
      // A file replaces a link, and not what it leads to.
      await volume.writeFile('abs', 'own', { force: true })
      assert.equal(await run(sbx, 'stat -c %F /v/abs; cat /v/abs'), 'regular file\nown')
      // Deeper than any path, and removed all the same.
      await run(sbx, `python3 -c "
import os
os.chdir('/v'); os.mkdir('deep'); os.chdir('deep')
for i in range(700):
    os.mkdir('d' * 200); os.chdir('d' * 200)
open('f', 'w')"`)
      await volume.remove('/deep')
      await volume.remove('/dir')
      assert.equal(await volume.exists('/deep'), false)
      await sbx.kill()
      await Volume.destroy(volume.volumeId)
    })
  })

  test('a capacity bounds uploads, and what sandboxes write', async () => {
    const api = (path, init) => fetch(process.env.E2B_API_URL + path, { ...init, headers: { 'X-API-Key': process.env.E2B_API_KEY, 'Content-Type': 'application/json' } })
    const { volumeID } = await (await api('/volumes', { method: 'POST', body: JSON.stringify({ name: 'small', capacity: 4 << 20 }) })).json()
    const volume = await Volume.connect(volumeID)
    const ready = until('the volume is measured', () => volume.makeDir('/d', { force: true }).catch(() => null))
    await ready
    await refused(volume.writeFile('/big', new Uint8Array(5 << 20).buffer), VolumeError, /507: .*full/)
    await refused(volume.writeFile('/big', new ReadableStream({ start(c) { for (let i = 0; i < 5; i++) c.enqueue(new Uint8Array(1 << 20)); c.close() } })), VolumeError, /507: .*full/)
    assert.deepEqual((await volume.list('/')).map((e) => e.path), ['/d'])
    await volume.writeFile('/fits', new Uint8Array(3 << 20).buffer)
    const sbx = await mounted({ '/v': volume })
    const full = await sbx.commands.run('head -c 6000000 /dev/zero 2>/tmp/error > /v/more; cat /tmp/error')
    assert.match(full.stdout, /No space left on device/)
    await until('it is full', async () => (await (await api(`/volumes/${volumeID}`)).json()).used >= 4 << 20)
    await refused(volume.writeFile('/x', 'x'), VolumeError, /507: .*full/)
    const other = await mounted({ '/v': volume })
    await run(other, 'test -s /v/more')
    await other.kill() // it keeps the file open, which would take its space after the removal
    await run(sbx, 'rm /v/more')
    await until('it has room again', () => volume.writeFile('/x', 'x', { force: true }).catch(() => null))
    await sbx.kill()
    await Volume.destroy(volumeID)
  })

  test('the rest is for after a restart', async () => {
    const volume = await Volume.create('Kept_One')
    await volume.writeFile('/kept', 'kept')
    const sbx = await mounted({ '/mnt/kept': volume })
    assert.deepEqual((await sbx.getInfo()).volumeMounts, [{ name: 'Kept_One', path: '/mnt/kept' }])
    console.log(`SANDBOX=${sbx.sandboxId}`)
  })
}
