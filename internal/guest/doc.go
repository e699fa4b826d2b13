// Package guest describes what runs inside a sandbox, and how the other planes access it. It
// holds no code itself.
//
//	agent        the first process of a sandbox: processes, files, ports, logs
//	envd         the wire format: E2B's envd protocol, with additions of ours
//	interpreter  files and packages of the image of the code interpreter
//	mcpgateway   the program mcp-gateway
//
// # Trust
//
// A sandbox's user may be root in it and may replace the agent. So nothing that comes from a
// sandbox is trusted: callers bound its size and time, and no secret of the server goes in.
// The token that the agent checks protects the sandbox from other clients, not the server from the sandbox.
//
// # Life
//
// The node starts the agent as PID 1 and calls /init with the token, the user and the variables. A checkpoint holds the
// agent with all other processes; after a restore /restored gives it its new identity. The
// agent reaps orphans, runs the image's entrypoint and restarts it by the spec.
//
// # Imports
//
// Packages here import base alone. Only cmd/barchan-agent imports agent, which must stay small: it is part of
// every sandbox's memory. All other planes may import envd.
package guest
