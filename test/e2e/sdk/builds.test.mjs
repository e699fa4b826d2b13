// Template builds through the unmodified E2B SDK, on a real node.
import test from 'node:test'
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { BuildError, Sandbox, Template, waitForPort } from 'e2b'

const dir = mkdtempSync(join(tmpdir(), 'barchan-build-'))
test.after(() => rmSync(dir, { recursive: true }))
mkdirSync(join(dir, 'src', 'sub'), { recursive: true })
writeFileSync(join(dir, 'src', 'app.txt'), 'hello from the test')
writeFileSync(join(dir, 'src', 'sub', 'deep.txt'), 'deep')
symlinkSync('app.txt', join(dir, 'src', 'link'))
writeFileSync(join(dir, 'server.py'), `
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'served')
    def log_message(self, *a): pass
http.server.HTTPServer(('', 8000), Handler).serve_forever()
`)

const base = process.env.BASE_IMAGE
const context = { fileContextPath: dir }
const said = (logs) => ({ onBuildLogs: (l) => logs.push(l.message) })
const kill = (sbx) => sbx.kill()

test('files, users, variables, a server that runs already', async () => {
  const logs = []
  const template = Template(context)
    .fromImage(base)
    .setEnvs({ GREETING: 'good day', DOLLAR: 'a $b' })
    .copy('src', '/srv/app/', { user: 'root', mode: 0o755 })
    .copy('server.py', 'server.py')
    .makeDir('made')
    .makeSymlink('/srv/app/app.txt', 'made/link')
    .runCmd('echo "$GREETING" > greeting; id -un >> greeting; pwd >> greeting')
    .runCmd('id -un > /root-was-here', { user: 'root' })
    .setWorkdir('/srv/app')
    .setStartCmd('python3 /home/user/server.py', waitForPort(8000))
  const info = await Template.build(template, 'whole', { ...said(logs), cpuCount: 1, memoryMB: 512 })
  assert.equal(await Template.exists('whole'), true)
  assert.ok(logs.some((l) => l.startsWith('RUN echo "$GREETING"')), logs.join('\n'))
  for (const name of ['whole', info.templateId]) {
    const sbx = await Sandbox.create(name)
    try {
      const out = await sbx.commands.run('cat /home/user/greeting /root-was-here; cat link sub/deep.txt; echo; cat /home/user/made/link; echo; stat -c "%U %a" app.txt; stat -c %U /home/user/server.py; pwd; echo $DOLLAR')
      assert.equal(out.stdout, 'good day\nuser\n/home/user\nroot\nhello from the testdeep\nhello from the test\nroot 755\nuser\n/srv/app\na $b\n')
      assert.equal((await sbx.commands.run('curl -s localhost:8000')).stdout, 'served')
      assert.equal((await sbx.getInfo()).cpuCount, 1)
    } finally {
      await kill(sbx)
    }
  }
})

test('what is the same is not done again', async () => {
  const template = (word) => Template(context).fromImage(base).runCmd('date +%N > first').copy('src/app.txt', 'second').runCmd(`echo ${word} > third`)
  const logs = []
  await Template.build(template('a'), 'again', said([]))
  let sbx = await Sandbox.create('again')
  const first = (await sbx.commands.run('cat first')).stdout
  await kill(sbx)
  await Template.build(template('b'), 'again', said(logs))
  assert.ok(logs.includes('CACHED COPY src/app.txt second') && logs.includes('RUN echo b > third'), logs.join('\n'))
  sbx = await Sandbox.create('again')
  assert.equal((await sbx.commands.run('cat first third')).stdout, `${first}b\n`)
  await kill(sbx)
  writeFileSync(join(dir, 'src', 'app.txt'), 'changed')
  await Template.build(template('b'), 'again', { ...said([]) })
  sbx = await Sandbox.create('again')
  assert.equal((await sbx.commands.run('cat first second')).stdout, `${first}changed`)
  await kill(sbx)
  await Template.build(template('b'), 'again', { ...said([]), skipCache: true })
  sbx = await Sandbox.create('again')
  assert.notEqual((await sbx.commands.run('cat first')).stdout, first)
  await kill(sbx)
})

test('a template of a template', async () => {
  await Template.build(Template(context).fromTemplate('whole').runCmd('cat app.txt > /tmp/more'), 'more', said([]))
  const sbx = await Sandbox.create('more')
  assert.equal((await sbx.commands.run('cat /tmp/more; echo; pwd; echo $GREETING')).stdout, 'hello from the test\n/srv/app\ngood day\n')
  await kill(sbx)
})

test('a Dockerfile', async () => {
  await Template.build(Template(context).fromDockerfile(`FROM ${base}\nENV WORD=docker\nRUN echo "$WORD" > /word\nCOPY server.py /opt/\nUSER user\nWORKDIR /home/user\n`), 'docker', said([]))
  const sbx = await Sandbox.create('docker')
  assert.equal((await sbx.commands.run('cat /word; ls /opt; id -un; pwd')).stdout, 'docker\nserver.py\nuser\n/home/user\n')
  await kill(sbx)
})

test('errors', async () => {
  const failed = (template, message) => assert.rejects(Template.build(template, 'bad', said([])), (err) => {
    assert.ok(err instanceof BuildError, String(err))
    assert.equal(err.message, message)
    assert.match(err.stack, /builds\.test\.mjs/)
    return true
  })
  await failed(Template().fromImage(base).runCmd('true').runCmd('exit 7'), "failed to run command 'exit 7': command failed: exit status 7")
  await failed(Template().fromImage(base).setUser('root123').runCmd('whoami'), "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'")
  assert.equal(await Template.exists('bad'), false)
})

test('in the background', async () => {
  const info = await Template.buildInBackground(Template().fromImage(base).runCmd('sleep 1'), 'later')
  let status = await Template.getBuildStatus(info)
  assert.equal(status.status, 'building')
  while (status.status === 'building') {
    await new Promise((r) => setTimeout(r, 100))
    status = await Template.getBuildStatus(info)
  }
  assert.equal(status.status, 'ready')
})

test('tags', async () => {
  const template = (word) => Template().fromImage(base).runCmd(`echo ${word} > word`)
  const word = async (name) => {
    const sbx = await Sandbox.create(name)
    try {
      return (await sbx.commands.run('cat word')).stdout.trim()
    } finally {
      await kill(sbx)
    }
  }
  const tags = async () => Object.fromEntries((await Template.getTags('tagged')).map((t) => [t.tag, t.buildId]))
  const one = await Template.build(template('one'), 'tagged:v1', { tags: ['stable'] })
  assert.deepEqual(one.tags, ['v1', 'stable'])
  await assert.rejects(Sandbox.create('tagged'), /template 'tagged' with tag 'default' not found/)
  const two = await Template.build(template('two'), 'tagged', { tags: ['default', 'v2'] })
  assert.equal(two.templateId, one.templateId)
  assert.deepEqual(await tags(), { default: two.buildId, stable: one.buildId, v1: one.buildId, v2: two.buildId })
  const given = await Template.assignTags('tagged:v2', ['stable', 'latest'])
  assert.deepEqual(given, { buildId: two.buildId, tags: ['stable', 'latest'] })
  for (const [name, want] of Object.entries({ tagged: 'two', 'tagged:v1': 'one', 'tagged:stable': 'two', 'tagged:latest': 'two' })) {
    assert.equal(await word(name), want, name)
  }
  await Template.build(Template().fromTemplate('tagged:v1').runCmd('echo more >> word'), 'tagged:v1')
  assert.equal(await word('tagged:v1'), 'one\nmore')
  assert.equal(await word('tagged:v2'), 'two')
  await Template.removeTags('tagged', ['v1', 'latest'])
  await assert.rejects(Sandbox.create('tagged:v1'), /template 'tagged:v1' not found/)
  assert.deepEqual(Object.keys(await tags()), ['default', 'stable', 'v2'])
  await assert.rejects(Template.removeTags('tagged', 'default'), /cannot delete the 'default' tag/)
  assert.equal(await Template.exists('tagged:v2'), true)
  assert.equal(await Template.exists('tagged:v1'), false)
})
