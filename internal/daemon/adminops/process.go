package adminops

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// processAnswers bounds a question to the server's process, which may hang.
const processAnswers = 5 * time.Second

// ServerProcess is the process of the server that a node has started.
type ServerProcess interface {
	// Admin reaches its own administration.
	Admin() *adminclient.Client
	// Component describes it.
	Component() adminclient.Component
}

// withServer returns the status of both processes together: they are administered as one.
func (s Server) withServer(ctx context.Context, node adminclient.Status) adminclient.Status {
	ctx, cancel := context.WithTimeout(ctx, processAnswers)
	defer cancel()
	process := s.cfg.Process.Component()
	self := adminclient.Component{Name: "node", Version: node.Version, State: node.Phase, PID: os.Getpid(), Path: node.DataDir}
	if node.Ready {
		self.State = "running"
	}
	parts := append([]adminclient.Component{process, self}, node.Components...)
	status, err := s.cfg.Process.Admin().Status(ctx)
	if err != nil {
		node.Role, node.Ready, node.Phase, node.Components = config.RoleServer, false, "server ("+process.State+")", parts
		return node
	}
	parts[0].Version = status.Version
	if status.Ready && !node.Ready {
		status.Ready, status.Phase = false, "node ("+node.Phase+")"
	}
	status.PID, status.DataDir, status.StartedAt, status.Components = node.PID, node.DataDir, node.StartedAt, parts
	return status
}

// checkServer has the checks of the server's process that are not the node's too.
func (s Server) checkServer(ctx context.Context) []adminclient.Check {
	ctx, cancel := context.WithTimeout(ctx, processAnswers)
	defer cancel()
	process := s.cfg.Process.Component()
	check := adminclient.Check{Name: "server process", State: adminclient.CheckOK, Detail: process.State}
	list, err := s.cfg.Process.Admin().Doctor(ctx)
	if err != nil {
		check.State, check.Detail, check.Remedy = adminclient.CheckFailed, process.State+": "+errs.Text(err), "read the server's log; it is started again by itself"
	}
	return append([]adminclient.Check{check}, slices.DeleteFunc(list, func(c adminclient.Check) bool { return c.Name == "node" })...)
}

// peers are those of the server, in whichever process it is.
func (s Server) peers() adminapi.Peers {
	if s.cfg.Process == nil {
		return gossip{s}
	}
	return remotePeers{s.cfg.Process.Admin()}
}

type remotePeers struct{ server *adminclient.Client }

// Peers implements adminapi.Peers.
func (p remotePeers) Peers(ctx context.Context) ([]adminclient.Replica, error) {
	return p.server.Peers(ctx)
}

// AddKey implements adminapi.Peers.
func (p remotePeers) AddKey(ctx context.Context, key string) (adminclient.PeerKey, error) {
	return p.server.AddPeerKey(ctx, key)
}

// UseKey implements adminapi.Peers.
func (p remotePeers) UseKey(ctx context.Context, id string) error {
	return p.server.UsePeerKey(ctx, id)
}

// RemoveKey implements adminapi.Peers.
func (p remotePeers) RemoveKey(ctx context.Context, id string) error {
	return p.server.RemovePeerKey(ctx, id)
}
