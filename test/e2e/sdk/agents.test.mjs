// The sandbox client of the OpenAI Agents SDK for E2B, without a model: what an agent's tools call.
import test from 'node:test'
import assert from 'node:assert/strict'
import { E2BSandboxClient } from '@openai/agents-extensions/sandbox/e2b'
import { file, Manifest } from '@openai/agents/sandbox'

const text = (bytes) => new TextDecoder().decode(bytes)
const options = { template: 'base', timeout: 300, env: { GREETING: 'hello' } }

const use = async (opts, work) => {
  const client = new E2BSandboxClient({ ...options, ...opts })
  const session = await client.create({ manifest: new Manifest({ entries: { 'notes/a.txt': file({ content: 'from the manifest' }) } }) })
  try {
    await work(session, client)
  } finally {
    await session.delete()
  }
}

test('a session: manifest, commands, files, editor', async () => {
  await use({}, async (session) => {
    assert.equal(await session.running(), true)
    assert.match(await session.execCommand({ cmd: 'node -v; cat notes/a.txt; echo; echo $GREETING' }), /v20\.[^]*from the manifest[^]*hello/)
    assert.match(await session.execCommand({ cmd: 'exit 7' }), /7/)
    assert.equal(text(await session.readFile({ path: 'notes/a.txt' })), 'from the manifest')
    const editor = session.createEditor()
    await editor.createFile({ type: 'create_file', path: 'made.txt', diff: '+first\n+second\n' })
    assert.equal(text(await session.readFile({ path: 'made.txt' })).trim(), 'first\nsecond')
    assert.equal(await session.pathExists('made.txt'), true)
    await editor.deleteFile({ type: 'delete_file', path: 'made.txt' })
    assert.equal(await session.pathExists('made.txt'), false)
  })
})

test('a terminal', async () => {
  await use({}, async (session) => {
    assert.equal(session.supportsPty(), true)
    const out = await session.execCommand({ cmd: 'read line; echo "got $line"', tty: true, yieldTimeMs: 500 })
    const id = Number(/session ID (\d+)/i.exec(out)?.[1])
    assert.ok(id, out)
    assert.match(await session.writeStdin({ sessionId: id, chars: 'a line\n', yieldTimeMs: 5_000 }), /got a line/)
  })
})

for (const workspacePersistence of ['tar', 'snapshot']) {
  test(`a session continues elsewhere: ${workspacePersistence}`, async () => {
    await use({ workspacePersistence }, async (session, client) => {
      await session.execCommand({ cmd: 'echo kept > kept.txt' })
      const saved = await session.persistWorkspace()
      const other = await client.create()
      try {
        await other.hydrateWorkspace(saved)
        assert.equal(text(await other.readFile({ path: 'kept.txt' })), 'kept\n')
        assert.match(await other.execCommand({ cmd: 'echo $GREETING' }), /hello/)
      } finally {
        await other.delete()
      }
    })
  })
}

test('a session is resumed from its state', async () => {
  await use({ pauseOnExit: true }, async (session, client) => {
    await session.execCommand({ cmd: 'echo kept > kept.txt' })
    await session.close()
    const state = await client.deserializeSessionState(JSON.parse(JSON.stringify(await client.serializeSessionState(session.state))))
    const back = await client.resume(state)
    assert.equal(text(await back.readFile({ path: 'kept.txt' })), 'kept\n')
  })
})
