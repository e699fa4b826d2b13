// Drives the template builds of the unmodified SDK against a server where a stand-in runs the builds.
// Usage: node build.mjs <path of e2b's index.mjs> <directory for files>
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'

const e2b = await import(pathToFileURL(process.argv[2]))
const { Template, waitForTimeout } = e2b
const dir = process.argv[3]
mkdirSync(join(dir, 'src'))
writeFileSync(join(dir, 'src', 'app.txt'), 'hello from the test')
writeFileSync(join(dir, 'src', 'large.bin'), randomBytes(3_000_000))
writeFileSync(join(dir, 'one.txt'), 'one')

const options = (logs) => ({ onBuildLogs: (l) => logs.push(l.message), cpuCount: 2, memoryMB: 512 })
const template = () =>
  Template({ fileContextPath: dir })
    .fromImage('debian:12')
    .copy('src', '/app/', { user: 'root', mode: 0o755 })
    .runCmd('echo hi', { user: 'root' })
    .setWorkdir('/app')
    .setUser('user')
    .setEnvs({ A: 'b', C: 'd' })
    .setStartCmd('sleep 1', waitForTimeout(1000))

// A build with its files and its log, in the order in which it was written.
if (Template.exists) assert.equal(await Template.exists('mine'), false)
let logs = []
const info = await Template.build(template(), 'mine', options(logs))
assert.match(info.templateId, /^t[a-z0-9]{19}$/)
assert.ok(logs.includes("Uploaded 'src'"), logs.join('\n'))
assert.deepEqual(logs.filter((l) => l.startsWith('entry ')), Array.from({ length: 250 }, (_, i) => `entry ${i}`))
if (Template.exists) assert.equal(await Template.exists('mine'), true)
const done = await Template.getBuildStatus({ templateId: info.templateId, buildId: info.buildId }, { logsOffset: 248 })
assert.equal(done.status, 'ready')
assert.deepEqual(done.logEntries.map((l) => [l.message, l.level]), [['entry 248', 'info'], ['entry 249', 'info']])

// The same again: the template's ID stays, and the files are there.
logs = []
const again = await Template.build(template(), 'mine:default', options(logs))
assert.equal(again.templateId, info.templateId)
assert.notEqual(again.buildId, info.buildId)
assert.ok(logs.includes("Skipping upload of 'src', already cached"), logs.join('\n'))
logs = []
await Template.build(template().copy('one.txt', '/one', { forceUpload: true }), 'forced', options(logs))
assert.ok(logs.includes("Uploaded 'one.txt'"), logs.join('\n'))

// A build that fails has the message, and the stack of the step.
const bad = Template().fromTemplate('base').runCmd('true').runCmd('fail now')
await assert.rejects(Template.build(bad, 'fails'), (err) => {
  assert.ok(err instanceof e2b.BuildError)
  assert.equal(err.message, "failed to run command 'fail now': exit status 1")
  assert.match(err.stack, /build\.mjs:/)
  return true
})

// In the background: building at once, and until the stand-in ends it.
const slow = await Template.buildInBackground(Template().fromImage('held'), 'slow')
for (let i = 0; i < 3; i++) assert.equal((await Template.getBuildStatus(slow)).status, 'building')

// Refusals.
const plain = () => Template().fromImage('debian:12').runCmd('true')
if (e2b.Template.assignTags) {
  await assert.rejects(Template.build(plain(), 'mine', { tags: ['-v1'] }), /400: tags\[0\]: /)
  const made = await Template.assignTags('mine', ['v1', 'v2'])
  await Template.removeTags('mine', 'v2')
  assert.deepEqual((await Template.getTags('mine')).map((t) => [t.tag, t.buildId]), [['default', made.buildId], ['v1', made.buildId]])
  await assert.rejects(Template.assignTags('mine:v3', 'v4'), /404: template 'mine' with tag 'v3' not found/)
}
await assert.rejects(Template.build(plain(), 'Not A Name'), /400: name: "Not A Name"/)
await assert.rejects(Template.build(plain(), 'broken'), /409: name: .*not made by a build/)
await assert.rejects(Template.build(Template().fromTemplate('nope'), 'x'), /400: fromTemplate: template 'nope' not found/)
await assert.rejects(
  Template.build(Template().fromAWSRegistry('private/x', { accessKeyId: 'a', secretAccessKey: 'b', region: 'c' }), 'x'),
  /400: fromImageRegistry.awsRegion: "c" is no region/,
)
const other = { apiKey: process.env.OTHER_API_KEY }
await assert.rejects(Template.getBuildStatus(info, other), /404: build .* not found/)
console.log('ok')
