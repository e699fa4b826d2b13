// Package mcpgateway is the program mcp-gateway of sandboxes, which E2B's SDKs run for the option `mcp` of a create. It starts
// servers of the Model Context Protocol that speak over standard input and output, and serves all that they have as one server,
// over streamable HTTP on port 50005 at /mcp, to clients with the token of the SDK.
//
// The SDK runs `mcp-gateway --config JSON` as root, with the token in GATEWAY_ACCESS_TOKEN, and waits for its end. So the program
// starts another process of itself, which serves, and ends when that is ready or has failed. The token is in [TokenFile], from
// which SDKs that connect later read it.
//
// Specification: https://modelcontextprotocol.io/specification.
package mcpgateway
