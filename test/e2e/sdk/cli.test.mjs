// E2B's own command line.
import test, { after, before } from 'node:test'
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Sandbox } from 'e2b'
import { machineOnly, until } from './lib.mjs'

const program = join(import.meta.dirname, 'node_modules/@e2b/cli/dist/index.js')
let home, sbx
before(async () => {
  home = await mkdtemp(join(tmpdir(), 'e2b-cli-')) // it reads its configuration there
  sbx = await Sandbox.create('base', { timeoutMs: 300_000, metadata: { suite: 'cli' } })
})
after(async () => {
  await sbx?.kill()
  await rm(home, { recursive: true })
})
const e2b = (...args) => new Promise((resolve) => {
  execFile(process.execPath, [program, ...args], { env: { ...process.env, HOME: home, NO_COLOR: '1' }, timeout: 60_000, killSignal: 'SIGKILL' },
    (error, stdout, stderr) => resolve({ code: error ? error.code ?? error.signal : 0, stdout, stderr, talk: `${stdout}${stderr}` })).stdin.end()
})
// onTerminal types into the command on a terminal, as a person would, and returns what that shows.
const onTerminal = (typed, ...args) => new Promise((resolve) => {
  const words = [process.execPath, program, ...args].map((w) => `'${w}'`).join(' ')
  const child = execFile('script', ['-qec', words, '/dev/null'], { env: { ...process.env, HOME: home, NO_COLOR: '1', TERM: 'xterm' }, timeout: 60_000, killSignal: 'SIGKILL' },
    (error, stdout) => resolve({ code: error ? error.code ?? error.signal : 0, talk: stdout }))
  let seen = ''
  child.stdout.on('data', (text) => {
    seen += text
    if (typed && /[$#] $/.test(seen.replace(/\x1b\[[?0-9;]*[a-zA-Z]/g, ''))) {
      child.stdin.write(typed)
      typed = ''
    }
  })
})
const ok = async (...args) => {
  const res = await e2b(...args)
  assert.equal(res.code, 0, `e2b ${args.join(' ')}: ${res.code}\n${res.talk}`)
  return res.stdout
}

test('list and info', async () => {
  const listed = JSON.parse(await ok('sandbox', 'list', '--format', 'json'))
  assert.ok(listed.some((s) => s.sandboxId === sbx.sandboxId), JSON.stringify(listed))
  assert.match(await ok('sandbox', 'info', sbx.sandboxId), new RegExp(sbx.sandboxId))
})

test('exec gives output and exit code', async () => {
  assert.match(await ok('sandbox', 'exec', sbx.sandboxId, 'node', '-v'), /^v20\./)
  assert.equal((await e2b('sandbox', 'exec', sbx.sandboxId, 'sh', '-c', 'exit 7')).code, 7)
})

test('logs are lines of JSON with level and logger, in every format', async () => {
  await sbx.commands.run('echo from a command')
  await until('some logs', async () => (await ok('sandbox', 'logs', '--level', 'DEBUG', '--format', 'json', sbx.sandboxId)).includes('{'))
  for (const line of (await ok('sandbox', 'logs', '--level', 'DEBUG', '--format', 'json', sbx.sandboxId)).split('\n').filter((l) => l.startsWith('{'))) {
    const entry = JSON.parse(line)
    assert.match(entry.level, /^(debug|info|warn|error)$/i, line)
  }
  const pretty = await e2b('sandbox', 'logs', '--level', 'DEBUG', sbx.sandboxId)
  assert.equal(pretty.code, 0, pretty.talk)
  assert.doesNotMatch(pretty.talk, /SyntaxError|TypeError|undefined/)
})

test('metrics, pause, resume, kill', machineOnly, async () => {
  await until('metrics', async () => /cpu/i.test(await ok('sandbox', 'metrics', sbx.sandboxId)))
  await ok('sandbox', 'pause', sbx.sandboxId)
  assert.equal(await sbx.isRunning(), false)
  await ok('sandbox', 'resume', sbx.sandboxId)
  assert.equal(await sbx.isRunning(), true)
  await ok('sandbox', 'kill', sbx.sandboxId)
  assert.equal(await sbx.isRunning(), false)
})

test('a template is created from a Dockerfile, listed and deleted', machineOnly, async () => {
  await writeFile(join(home, 'e2b.Dockerfile'), `FROM ${process.env.BASE_IMAGE}\nRUN echo made > /made\n`)
  await ok('template', 'create', 'of-the-cli', '--path', home, '--cpu-count', '1', '--memory-mb', '512')
  const listed = JSON.parse(await ok('template', 'list', '--format', 'json'))
  const one = listed.find((t) => t.aliases.includes('of-the-cli'))
  assert.deepEqual([one.cpuCount, one.memoryMB, one.buildStatus], [1, 512, 'ready'])
  const of = await Sandbox.create('of-the-cli')
  try {
    assert.equal((await of.commands.run('cat /made')).stdout, 'made\n')
  } finally {
    await of.kill()
  }
  await ok('template', 'delete', '-y', 'of-the-cli')
  assert.doesNotMatch(await ok('template', 'list'), /of-the-cli/)
  assert.notEqual((await e2b('template', 'delete', '-y', 'of-the-cli')).code, 0)
})

test('create has a terminal in a sandbox, which ends with it', async () => {
  const { code, talk } = await onTerminal('echo answer-$((40+2)); exit\n', 'sandbox', 'create', 'base')
  assert.match(talk, /answer-42/, `${code}\n${talk}`)
  assert.equal(code, 0, talk)
})
