package kubecluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

// machine is where programs of a cluster run. The control plane shares one with the first node.
type machine struct {
	ns      *namespaces
	dir     string
	address string
}

// ip runs the program ip in the machine's network namespace.
func (m machine) ip(ctx context.Context, args ...string) error {
	if out, err := m.ns.command(ctx, "ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %v: %w: %s", args, err, out)
	}
	return nil
}

// addMachine makes the machine of a node, linked to that of the control plane, with routes to the Pods of both. They reach each
// other; those of a third machine are not reached.
func (c *Cluster) addMachine(ctx context.Context, n *node, address string) (err error) {
	n.machine = machine{dir: filepath.Join(c.dir, n.name), address: address}
	if err := os.Mkdir(n.dir, 0o755); err != nil {
		return err
	}
	if n.ns, err = newNamespaces(exec.Command(filepath.Join(c.dir, "pod"))); err != nil { //nolint:noctx // ended in order
		return fmt.Errorf("make namespaces: %w", err)
	}
	c.undo.add(n.ns.end)
	if err := n.ns.mount(n.dir, binDir()); err != nil {
		return err
	}
	const link = "eth0"
	failures := []error{
		c.ip(ctx, "link", "add", n.name, "type", "veth", "peer", "name", link, "netns", strconv.Itoa(n.ns.pid)),
		c.ip(ctx, "link", "set", n.name, "up"),
		n.ip(ctx, "link", "set", "lo", "up"),
		n.ip(ctx, "link", "set", link, "up"),
		n.ip(ctx, "address", "add", n.address+"/32", "dev", "lo"),
		c.ip(ctx, "route", "add", n.address, "dev", n.name, "src", c.address),
		c.ip(ctx, "route", "add", n.podCIDR, "via", n.address, "dev", n.name, "onlink"),
	}
	for _, to := range []string{c.address, ServiceIP, dnsIP} {
		failures = append(failures, n.ip(ctx, "route", "add", to, "dev", link, "src", n.address))
	}
	failures = append(failures, n.ip(ctx, "route", "add", c.nodes[0].podCIDR, "via", c.address, "dev", link, "onlink"))
	for _, m := range []machine{c.machine, n.machine} {
		failures = append(failures, m.ns.inNetwork(func() error {
			return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600) // of the thread's namespace
		}))
	}
	return errors.Join(failures...)
}

// PowerOff ends all programs of a node's machine at once, and its link, as a loss of power does. The first node has the control
// plane's, which stays.
func (c *Cluster) PowerOff(t testing.TB, name string) {
	t.Helper()
	for _, n := range c.nodes {
		if n.name != name || n.ns == c.ns {
			continue
		}
		c.programs = slices.DeleteFunc(c.programs, func(p *program) bool { return p.in == n.ns })
		if err := n.ns.init.kill(); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("%s cannot be switched off", name)
}
