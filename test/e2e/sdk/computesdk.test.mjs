// ComputeSDK over its provider for E2B, by what its benchmark does.
import test from 'node:test'
import assert from 'node:assert/strict'
import { e2b } from '@computesdk/e2b'
import { compute } from 'computesdk'

const use = async (sdk, work) => {
  const sandbox = await sdk.sandbox.create()
  try {
    await work(sandbox)
  } finally {
    await sandbox.destroy()
  }
}

test('create, node -v, destroy', async () => {
  compute.setConfig({ provider: e2b({ apiKey: process.env.E2B_API_KEY }) })
  for (let n = 0; n < 3; n++) {
    await use(compute, async (sandbox) => {
      const res = await sandbox.runCommand('node -v')
      assert.equal(res.exitCode, 0, JSON.stringify(res))
      assert.match(res.stdout, /^v20\./)
    })
  }
})

test('commands: cwd, env, exit codes', async () => {
  await use(e2b({}), async (sandbox) => {
    assert.equal((await sandbox.runCommand('pwd; echo $A', { cwd: '/tmp', env: { A: 'b' } })).stdout.split('\n')[0], '/tmp')
    assert.equal((await sandbox.runCommand('sh -c "echo $A"', { env: { A: 'b' } })).exitCode, 0)
    assert.equal((await sandbox.runCommand('exit 7')).exitCode, 7)
    assert.equal((await sandbox.runCommand('no-such-program')).exitCode, 127)
    assert.equal((await sandbox.runCommand("node - <<'JS'\nconsole.log(6*7)\nJS")).stdout, '42\n')
    assert.equal((await sandbox.runCommand("python - <<'PY'\nprint(6*7)\nPY")).stdout, '42\n')
  })
})

test('files', async () => {
  await use(e2b({}), async ({ filesystem }) => {
    await filesystem.mkdir('/tmp/data')
    await filesystem.writeFile('/tmp/data/a.txt', 'text')
    assert.equal(await filesystem.readFile('/tmp/data/a.txt'), 'text')
    assert.deepEqual((await filesystem.readdir('/tmp/data')).map((e) => e.name), ['a.txt'])
    assert.equal(await filesystem.exists('/tmp/data/a.txt'), true)
    await filesystem.remove('/tmp/data')
    assert.equal(await filesystem.exists('/tmp/data/a.txt'), false)
  })
})

test('what was destroyed is gone', async () => {
  const sdk = e2b({})
  const sandbox = await sdk.sandbox.create()
  assert.ok(await sdk.sandbox.getById(sandbox.sandboxId))
  await sandbox.destroy()
  assert.equal(await sdk.sandbox.getById(sandbox.sandboxId), null)
})
