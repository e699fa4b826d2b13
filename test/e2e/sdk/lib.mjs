// What the suites share.
import assert from 'node:assert/strict'

// machineOnly are the options of a test of what Pods cannot do: keep memory, a root file system, or layers of builds.
export const machineOnly = process.env.PODS ? { skip: 'sandboxes are Pods here' } : {}

// until retries until there is a result, and returns it.
export const until = async (what, probe, ms = 120_000) => {
  for (const end = Date.now() + ms; Date.now() < end; ) {
    const got = await probe()
    if (got) return got
    await new Promise((r) => setTimeout(r, 20))
  }
  assert.fail(`${what}: not within ${ms} ms`)
}

// rpc calls the agent's Connect API, for what the JS SDK has no method.
export const rpc = async (sbx, method, body) => {
  const res = await fetch(`${process.env.E2B_SANDBOX_URL}/${method}`, {
    method: 'POST',
    headers: {
      'Content-Type': 'application/json', 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': '49983',
      'X-Access-Token': sbx.envdAccessToken, Authorization: 'Basic ' + btoa('user:'),
    },
    body: JSON.stringify(body),
  })
  assert.equal(res.status, 200, `${method}: ${res.status} ${await res.clone().text()}`)
  return res.json()
}
