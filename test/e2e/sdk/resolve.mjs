// Resolves *.localhost to loopback, as browsers and systemd-resolved do; plain libc does not.
import dns from 'node:dns'

const lookup = dns.lookup
dns.lookup = (host, options, callback) => {
  if (typeof options === 'function') [options, callback] = [{}, options]
  if (!host.endsWith('.localhost')) return lookup(host, options, callback)
  if (options.all) process.nextTick(callback, null, [{ address: '127.0.0.1', family: 4 }])
  else process.nextTick(callback, null, '127.0.0.1', 4)
}
