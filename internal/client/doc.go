// Package client describes the programs on the user's side. It holds no code itself.
//
//	cli           the commands of barchan
//	adminclient   the admin socket of a server on the same machine
//	cluster       installs Barchan on a Kubernetes cluster, and removes it
//	kubeobjects   reads objects from files, and applies and deletes them
//	dockerfile    turns a Dockerfile into the steps of a template build
//	bundle        support bundles
//
// The client of the E2B API is public, and so at the root of the module.
//
// Commands hold no rules: they call the Kubernetes API, the E2B API or the admin socket, and show the
// responses. Results go to stdout, messages to stderr.
//
// # Imports
//
// Packages here import base, the agent's wire format in guest, and config, which defines the flags of
// `barchan up`. They do not import the server: main passes in the function that starts one.
package client
