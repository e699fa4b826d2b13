// Public methods of the unmodified E2B SDK that no other suite calls. With those, each method that needs no public registry is called once.
import test, { after, before, describe } from 'node:test'
import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { NotFoundError, Sandbox, Secret, Template, waitForFile } from 'e2b'
import { machineOnly } from './lib.mjs'

describe('one sandbox', () => {
  let sbx
  before(async () => { sbx = await Sandbox.create('base', { timeoutMs: 300_000 }) })
  after(async () => { await sbx?.kill() })
  const run = async (command) => (await sbx.commands.run(command)).stdout

  test('files.writeFiles, pty.kill', async () => {
    const made = await sbx.files.writeFiles([{ path: 'many/1', data: 'one' }, { path: 'many/2', data: new Blob(['two']) }])
    assert.deepEqual(made.map((f) => f.path), ['/home/user/many/1', '/home/user/many/2'])
    assert.equal(await run('cat many/1 many/2'), 'onetwo')
    const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {} })
    assert.equal(await sbx.pty.kill(pty.pid), true)
    await assert.rejects(pty.wait())
    assert.equal(await sbx.pty.kill(pty.pid), false)
  })

  test('what the class does by an ID', async () => {
    const full = await Sandbox.getFullInfo(sbx.sandboxId)
    assert.equal(full.sandboxId, sbx.sandboxId)
    const [sample] = (await Sandbox.getMetrics(sbx.sandboxId)).slice(-1)
    assert.ok(sample.memUsed > 0 && sample.cpuCount > 0, JSON.stringify(sample))
    await Sandbox.updateNetwork(sbx.sandboxId, { denyOut: ['9.9.9.9'] })
    assert.deepEqual((await sbx.getInfo()).network?.denyOut, ['9.9.9.9'])
    await sbx.updateNetwork({ denyOut: [] })
    assert.deepEqual((await sbx.getInfo()).network?.denyOut ?? [], [])
    assert.match(sbx.getMcpUrl(), /\/mcp$/)
    await assert.rejects(sbx.getMcpToken(), NotFoundError) // it has no MCP server
  })

  test('betaPause', machineOnly, async () => {
    const other = await Sandbox.create('base')
    try {
      assert.equal(await other.betaPause(), true)
      await other.connect()
      assert.equal(await Sandbox.betaPause(other.sandboxId), true)
      assert.equal((await other.getInfo()).state, 'paused')
    } finally { await other.kill() }
  })

  test('git', async () => {
    const { git } = sbx
    await git.init('remote.git', { bare: true, initialBranch: 'main' })
    await git.init('repo', { initialBranch: 'main' })
    await git.configureUser('A Person', 'a@example.com')
    await git.setConfig('pull.rebase', 'false')
    assert.equal(await git.getConfig('user.name'), 'A Person')
    assert.equal(await git.getConfig('no.such'), undefined)
    await sbx.files.write('repo/a', 'one\n')
    assert.equal((await git.status('repo')).untrackedCount, 1)
    await git.add('repo')
    assert.equal((await git.status('repo')).stagedCount, 1)
    await git.reset('repo', { paths: ['a'] }).catch(() => {}) // there is no commit to reset to
    await git.add('repo', { files: ['a'] })
    await git.commit('repo', 'first', { authorName: 'Another', authorEmail: 'b@example.com' })
    assert.equal(await run('git -C repo log --format="%an %s"'), 'Another first\n')
    await git.remoteAdd('repo', 'origin', '/home/user/remote.git')
    assert.equal(await git.remoteGet('repo', 'origin'), '/home/user/remote.git')
    await git.push('repo', { remote: 'origin', branch: 'main' })
    await git.clone('/home/user/remote.git', { path: 'copy', branch: 'main' })
    await git.createBranch('copy', 'work')
    assert.deepEqual(await git.branches('copy').then((b) => [b.branches.sort(), b.currentBranch]), [['main', 'work'], 'work'])
    await sbx.files.write('copy/a', 'two\n')
    await git.restore('copy', { paths: ['a'] })
    assert.equal((await git.status('copy')).isClean, true)
    await sbx.files.write('copy/a', 'three\n')
    await git.checkoutBranch('copy', 'main')
    await git.add('copy')
    await git.commit('copy', 'second')
    await git.push('copy')
    await git.deleteBranch('copy', 'work', { force: true })
    await git.pull('repo', { remote: 'origin', branch: 'main' })
    assert.equal(await run('cat repo/a'), 'three\n')
    await git.reset('repo', { mode: 'hard', target: 'HEAD~1' })
    assert.equal(await run('cat repo/a'), 'one\n')
    await git.dangerouslyAuthenticate({ username: 'person', password: 'secret', host: 'git.example' })
    assert.match(await run('cat .git-credentials'), /^https:\/\/person:secret@git\.example/)
  })
})

test('secrets are refused as a team without them is', async () => {
  for (const call of [() => Secret.create('name', 'value'), () => Secret.getInfo('name'), () => Secret.update('name', 'value'), () => Secret.exists('name'), () => Secret.destroy('name'), () => Secret.list().nextItems()]) {
    await assert.rejects(call, /403: secrets: not available/)
  }
  assert.equal(typeof Secret.fill('name'), 'string')
})

test('templates: forms, installs from files, clones, ready commands', machineOnly, async () => {
  const dir = mkdtempSync(join(tmpdir(), 'barchan-methods-'))
  test.after(() => rmSync(dir, { recursive: true }))
  for (const [name, text] of Object.entries({
    'py/setup.py': 'from setuptools import setup\nsetup(name="tiny", version="1", py_modules=["tiny"])\n', 'py/tiny.py': 'word = "tiny works"\n',
    'js/package.json': JSON.stringify({ name: 'tiny', version: '1.0.0', main: 'index.js' }), 'js/index.js': 'module.exports = "tiny works"\n',
  })) {
    mkdirSync(join(dir, name, '..'), { recursive: true })
    writeFileSync(join(dir, name), text)
  }
  const template = Template({ fileContextPath: dir })
    .fromImage(process.env.BASE_IMAGE)
    .copyItems([{ src: 'py', dest: '/srv/py' }, { src: 'js', dest: '/srv/js', user: 'root' }])
    .skipCache()
    .runCmd('git init -q /tmp/origin && cd /tmp/origin && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first')
    .gitClone('/tmp/origin', '/home/user/cloned')
    .pipInstall('--no-index --no-build-isolation /srv/py', { g: true })
    .npmInstall('/srv/js', { g: true })
    .setReadyCmd(waitForFile('/home/user/cloned/.git/HEAD'))
  assert.match(await Template.toJSON(template), /"steps"/)
  assert.throws(() => Template.toDockerfile(Template().fromTemplate('base')))
  assert.match(Template.toDockerfile(template), /^FROM .*base/)
  const logs = []
  await Template.build(template, 'methods', { onBuildLogs: (l) => logs.push(l.message) }).catch((e) => assert.fail(`${e.message}\n${logs.join('\n')}`))
  assert.equal(await Template.aliasExists('methods'), true)
  const sbx = await Sandbox.create('methods')
  try {
    assert.equal((await sbx.commands.run('python3 -c "import tiny; print(tiny.word)"; NODE_PATH=$(npm root -g) node -p "require(\'tiny\')"; git -C cloned log --format=%s')).stdout, 'tiny works\ntiny works\nfirst\n')
  } finally { await sbx.kill() }
  // What names public images and programs is only written down here: there is no network.
  const images = Template()
  for (const [method, image] of [['fromDebianImage', 'debian'], ['fromUbuntuImage', 'ubuntu'], ['fromFedoraImage', 'fedora'], ['fromAlpineImage', 'alpine'], ['fromArchImage', 'arch'], ['fromPythonImage', 'python'], ['fromNodeImage', 'node'], ['fromBunImage', 'bun'], ['fromBaseImage', 'base']]) {
    assert.match(await Template.toJSON(images[method]()), new RegExp(image), method)
  }
})
