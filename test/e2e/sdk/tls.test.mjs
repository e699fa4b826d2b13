// The SDK as it finds a server by E2B_DOMAIN alone: TLS, HTTP/2, a host name per sandbox.
import test from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox } from 'e2b'

test('everything by E2B_DOMAIN', async () => {
  assert.ok(process.env.E2B_DOMAIN && !process.env.E2B_API_URL && !process.env.E2B_SANDBOX_URL)
  const sbx = await Sandbox.create()
  try {
    assert.equal((await sbx.commands.run('echo over tls')).stdout, 'over tls\n')
    await sbx.files.write('f', 'x'.repeat(1 << 20))
    assert.equal((await sbx.files.read('f')).length, 1 << 20)
    assert.equal(await (await fetch(await sbx.downloadUrl('f'))).text(), 'x'.repeat(1 << 20))
    await sbx.commands.run('python3 -m http.server 8000', { background: true })
    let res
    for (const end = Date.now() + 120_000; Date.now() < end; ) {
      res = await fetch(`https://${sbx.getHost(8000)}/`)
      if (res.status === 200) break
    }
    assert.equal(res.status, 200)
  } finally {
    await sbx.kill()
  }
})
