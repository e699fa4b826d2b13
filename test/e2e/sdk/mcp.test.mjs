// The option `mcp` of the unmodified SDK: servers of the Model Context Protocol in the sandbox, used by the official client.
import test, { after, before } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox, SandboxError } from 'e2b'
import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client'

const timeoutMs = 300_000
const root = { user: 'root' }

// A server of the protocol over standard input and output, without a library, so that no registry is needed.
const program = `
const tool = (name, properties) => ({ name, description: name, inputSchema: { type: 'object', properties } })
const number = { type: 'number' }
const answers = {
  initialize: (p) => ({ protocolVersion: p.protocolVersion, capabilities: { tools: {}, prompts: {}, resources: {} }, serverInfo: { name: 'test', version: '1' } }),
  'tools/list': () => ({ tools: [tool('add', { a: number, b: number }), tool(process.env.OWN_TOOL, {})] }),
  'tools/call': ({ name, arguments: a }) => ({ content: [{ type: 'text', text: name === 'add' ? String(a.a + a.b) : JSON.stringify([process.cwd(), process.env]) }] }),
  'prompts/list': () => ({ prompts: [{ name: 'greet', arguments: [{ name: 'who' }] }] }),
  'prompts/get': (p) => ({ messages: [{ role: 'user', content: { type: 'text', text: 'Hello ' + p.arguments.who } }] }),
  'resources/list': () => ({ resources: [{ uri: 'test://' + process.env.OWN_TOOL, name: 'a resource' }] }),
  'resources/read': (p) => ({ contents: [{ uri: p.uri, text: 'content' }] }),
}
require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
  const { id, method, params } = JSON.parse(line)
  if (id === undefined) return
  const answer = answers[method]
  console.log(JSON.stringify({ jsonrpc: '2.0', id, ...(answer ? { result: answer(params ?? {}) } : { error: { code: -32601, message: method } }) }))
})`

// GitHub is a directory of the sandbox.
const prepare = `set -e
mkdir -p /srv/git/example/first && cd /srv/git/example/first
cat > server.js
git init -q && git add . && git -c user.name=t -c user.email=t@t commit -qm first
cp -r . ../second
git config --system url.file:///srv/git/.insteadOf https://github.com/
git config --system safe.directory '*'`

const clients = []
const connect = async (sbx, token) => {
  const client = new Client({ name: 'test', version: '1' })
  await client.connect(new StreamableHTTPClientTransport(new URL(`${process.env.E2B_SANDBOX_URL}/mcp`), {
    requestInit: { headers: { Authorization: `Bearer ${token}`, 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': new URL(sbx.getMcpUrl()).host.split('-')[0] } },
  }))
  clients.push(client)
  return client
}
const text = (result) => result.content[0].text

let snapshot
before(async () => {
  const sbx = await Sandbox.create('mcp-gateway', { timeoutMs })
  await sbx.files.write('/tmp/server.js', program)
  await sbx.commands.run(`(${prepare.replace('cat >', 'cat /tmp/server.js >')})`, root)
  snapshot = (await sbx.createSnapshot()).snapshotId
  await sbx.kill()
})
after(async () => {
  await Promise.all(clients.map((c) => c.close()))
  await Sandbox.deleteSnapshot(snapshot)
})

test('servers of repositories are one server of the sandbox', async () => {
  const runCmd = 'node server.js'
  const sbx = await Sandbox.create(snapshot, {
    timeoutMs, mcp: {
      'github/example/first': { installCmd: 'test -z "$GATEWAY_ACCESS_TOKEN" && echo $OWN_TOOL > installed', runCmd, envs: { OWN_TOOL: 'first_env' } },
      'github/example/second': { runCmd, envs: { OWN_TOOL: 'second_env' } },
    },
  })
  const token = await sbx.getMcpToken()
  let client = await connect(sbx, token)
  assert.deepEqual((await client.listTools()).tools.map((t) => t.name).sort(), ['add', 'first_env', 'second_add', 'second_env'])
  for (const name of ['add', 'second_add']) assert.equal(text(await client.callTool({ name, arguments: { a: 2, b: 3 } })), '5')
  const [dir, env] = JSON.parse(text(await client.callTool({ name: 'first_env', arguments: {} })))
  assert.deepEqual([dir, env.OWN_TOOL, env.GATEWAY_ACCESS_TOKEN], ['/opt/mcp-gateway/example/first', 'first_env', undefined])
  assert.equal(await sbx.files.read('/opt/mcp-gateway/example/first/installed'), 'first_env\n')
  assert.equal((await client.getPrompt({ name: 'greet', arguments: { who: 'you' } })).messages[0].content.text, 'Hello you')
  assert.deepEqual((await client.listResources()).resources.map((r) => r.uri).sort(), ['test://first_env', 'test://second_env'])
  assert.equal((await client.readResource({ uri: 'test://second_env' })).contents[0].text, 'content')

  // Another client of the sandbox finds the token; the processes outlive a pause.
  await sbx.pause()
  const again = await Sandbox.connect(sbx.sandboxId)
  assert.equal(await again.getMcpToken(), token)
  client = await connect(again, token)
  assert.equal(text(await client.callTool({ name: 'add', arguments: { a: 4, b: 5 } })), '9')
  await assert.rejects(connect(again, 'another'), /401|token/i)
  const fails = (command, opts, stderr) => assert.rejects(again.commands.run(command, opts), (err) => stderr.test(err.stderr))
  await fails('cat /etc/mcp-gateway/.token', {}, /Permission denied/)
  await fails("GATEWAY_ACCESS_TOKEN=x mcp-gateway --config '{}'", root, /another gateway may run: .*address already in use/)
  await fails("mcp-gateway --config '{}'", root, /GATEWAY_ACCESS_TOKEN: is required/)
  await fails('mcp-gateway pull browserbase', root, /browserbase: servers of Docker's catalog/)
  await again.kill()
})

test('a server that does not start is told, and the sandbox is gone', async () => {
  const before = (await Sandbox.list().nextItems()).length
  for (const [mcp, why] of [
    [{ browserbase: { apiKey: 'x' } }, /browserbase: servers of Docker's catalog are container images.*"github\/OWNER\/REPOSITORY"/],
    [{ 'github/example/first': {} }, /github\/example\/first: runCmd: is required/],
    [{ 'github/example/first': { runCmd: 'true', runcommand: 'x' } }, /github\/example\/first: .*unknown field "runcommand"/],
    [{ 'github/../../etc': { runCmd: 'true' } }, /github\/\.\.\/\.\.\/etc: /],
    [{ 'github/example/none': { runCmd: 'true' } }, /github\/example\/none: fetch the repository: .*does not appear to be a git repository/],
    [{ 'github/example/first': { installCmd: 'echo broken; exit 3', runCmd: 'true' } }, /github\/example\/first: installCmd: exit status 3: broken/],
    [{ 'github/example/first': { runCmd: 'false' } }, /github\/example\/first: runCmd: start "false"/],
  ]) {
    await assert.rejects(Sandbox.create(snapshot, { timeoutMs, mcp }), (err) => {
      assert.ok(err instanceof SandboxError, err.constructor.name)
      assert.match(err.message, /^Failed to start MCP gateway: /)
      assert.match(err.message, why)
      return true
    })
  }
  await assert.rejects(Sandbox.create({ timeoutMs, mcp: { browserbase: {} } }), /browserbase: servers of Docker's catalog/) // by the default template
  assert.equal((await Sandbox.list().nextItems()).length, before)
})
