// A server of node with an interval. GET / says who it is and how often the interval has come.
const who = require('crypto').randomBytes(8).toString('hex')
let ticks = 0
setInterval(() => { ticks++ }, 5)
require('http').createServer((_, res) => res.end(`${who} ${ticks}`)).listen(process.env.PORT || 8080)
