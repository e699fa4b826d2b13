// Mastra's workspace over its sandbox for E2B.
import test from 'node:test'
import assert from 'node:assert/strict'
import { Workspace } from '@mastra/core/workspace'
import { E2BSandbox } from '@mastra/e2b'

test('a workspace runs commands, and comes back by its ID', async () => {
  const options = { id: `mastra-${process.pid}`, template: 'base', timeout: 300_000, env: { GREETING: 'hello' } }
  const sandbox = new E2BSandbox(options)
  const workspace = new Workspace({ sandbox })
  await workspace.init()
  try {
    const res = await sandbox.executeCommand('node', ['-v'])
    assert.equal(res.exitCode, 0, res.stderr)
    assert.match(res.stdout, /^v20\./)
    assert.equal((await sandbox.executeCommand('sh', ['-c', 'echo $GREETING $MORE'], { env: { MORE: 'world' } })).stdout, 'hello world\n')
    assert.equal((await sandbox.executeCommand('sh', ['-c', 'exit 7'])).exitCode, 7)
    assert.equal((await sandbox.executeCommand('pwd', [], { cwd: '/tmp' })).stdout, '/tmp\n')

    let streamed = ''
    const child = await sandbox.processes.spawn('for i in 1 2 3; do echo $i; done', { onStdout: (d) => { streamed += d } })
    assert.equal((await child.wait()).exitCode, 0)
    assert.equal(streamed, '1\n2\n3\n')

    await sandbox.writeFiles([{ path: '/home/user/a/b.txt', content: 'written' }])
    const same = new E2BSandbox(options)
    await same.start()
    assert.equal((await same.executeCommand('cat', ['/home/user/a/b.txt'])).stdout, 'written')
    assert.equal((await same.getInfo()).status, 'running')
  } finally {
    await sandbox.destroy()
  }
})
