// Template builds from a private image through the unmodified E2B SDK, on a real node.
import test from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox, Template } from 'e2b'

const image = process.env.PRIVATE_IMAGE
const username = process.env.REGISTRY_USER

test('an image of a registry that requires a user', async () => {
  const right = { username, password: process.env.REGISTRY_PASSWORD }
  await assert.rejects(Template.build(Template().fromImage(image, { username, password: 'wrong' }).runCmd('true'), 'private-wrong'), /401|denied/)
  await Template.build(Template().fromImage(image, right).runCmd('echo built > built'), 'private-built')
  const sbx = await Sandbox.create('private-built')
  try {
    assert.equal((await sbx.commands.run('cat built')).stdout, 'built\n')
  } finally {
    await sbx.kill()
  }
})
