// Package ports lists listeners in a sandbox, and forwards to those on its loopback alone.
//
// It keeps nothing and scans only on request, so an unused sandbox does no work for it. It opens no port of its own, so that no program finds one taken.
package ports

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// stateListen is how /proc/net/tcp writes LISTEN.
const stateListen = "0A"

// Look finds the owners of sockets among the processes of a user and group. Without root or the
// right to trace others, a process sees only the sockets of its own user.
type Look func(uid, gid uint32, inodes []string) (map[string]Owner, error)

// List returns what listens on TCP, by port and address, as a proc file system has it. What the
// process without listens on is left out. Where this process may not see whose a socket is, as
// looks in its place; what it does not find stays without a name.
func List(proc string, without int, as Look) ([]envd.ListeningPort, error) {
	var found []socket
	for _, name := range []string{"net/tcp", "net/tcp6"} {
		more, err := sockets(filepath.Join(proc, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			return nil, err
		}
		found = append(found, more...)
	}
	owners := find(proc, found, as)
	list := make([]envd.ListeningPort, 0, len(found))
	for _, s := range found {
		p := envd.ListeningPort{Port: s.at.Port(), Address: s.at.Addr().String()}
		if owner, ok := owners[s.inode]; ok {
			p.PID, p.Process = owner.PID, short(owner.Name)
		}
		if p.PID == 0 || p.PID != without {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b envd.ListeningPort) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Address, b.Address), cmp.Compare(a.PID, b.PID))
	})
	return slices.Compact(list), nil
}

// socket is one that listens.
type socket struct {
	at    netip.AddrPort
	inode string
}

// sockets reads the listening sockets of a file like /proc/net/tcp.
func sockets(file string) ([]socket, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read sockets: %w", err)
	}
	defer func() { _ = f.Close() }()
	var found []socket
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if s, ok := parseSocket(lines.Text()); ok {
			found = append(found, s)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read sockets: %w", err)
	}
	return found, nil
}

// parseSocket reads a line if it is that of a socket which listens.
func parseSocket(line string) (socket, bool) {
	// sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode
	fields := strings.Fields(line)
	if len(fields) < 10 || fields[3] != stateListen {
		return socket{}, false
	}
	host, port, ok := strings.Cut(fields[1], ":")
	if !ok {
		return socket{}, false
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return socket{}, false
	}
	raw, err := hex.DecodeString(host)
	if err != nil || len(raw)%4 != 0 {
		return socket{}, false
	}
	for word := range slices.Chunk(raw, 4) { // each in the order of the machine's bytes
		binary.BigEndian.PutUint32(word, binary.NativeEndian.Uint32(word))
	}
	addr, ok := netip.AddrFromSlice(raw)
	return socket{netip.AddrPortFrom(addr, uint16(n)), fields[9]}, ok
}

// Owner is a process that has a socket.
type Owner struct {
	PID  int    `json:"pid"`
	Name string `json:"name"`
}

// maxKinds bounds how many users List looks as.
const maxKinds = 16

// find returns the owners of sockets by inode.
func find(proc string, found []socket, as Look) map[string]Owner {
	missing := make([]string, len(found))
	for i, s := range found {
		missing[i] = s.inode
	}
	of := Owners(proc, missing)
	for _, k := range hidden(proc) {
		missing = slices.DeleteFunc(missing, func(inode string) bool { return of[inode].PID != 0 })
		if len(missing) == 0 || as == nil {
			break
		}
		if more, err := as(k.uid, k.gid, missing); err == nil { // else they stay unknown
			maps.Copy(of, more)
		}
	}
	return of
}

// Owners finds whose sockets those of the inodes are, as far as this process may see. Processes
// that end meanwhile are no error.
func Owners(proc string, inodes []string) map[string]Owner {
	want := map[string]string{}
	for _, inode := range inodes {
		want["socket:["+inode+"]"] = inode
	}
	of := map[string]Owner{}
	for _, pid := range processes(proc) {
		if len(of) == len(want) {
			break
		}
		dir := filepath.Join(proc, strconv.Itoa(pid))
		fds, err := os.ReadDir(filepath.Join(dir, "fd"))
		if err != nil {
			continue
		}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
			if inode, ok := want[to]; err == nil && ok && of[inode].PID == 0 {
				of[inode] = Owner{pid, nameOf(dir)}
			}
		}
	}
	return of
}

func processes(proc string) (pids []int) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// kind is what processes have in common that may look at each other.
type kind struct{ uid, gid uint32 }

// hidden are the kinds of processes into which this one may not look.
func hidden(proc string) (kinds []kind) {
	for _, pid := range processes(proc) {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		if !errors.Is(mayLook(filepath.Join(dir, "fd")), fs.ErrPermission) {
			continue
		}
		if k, ok := kindOf(dir); ok && !slices.Contains(kinds, k) && len(kinds) < maxKinds {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// mayLook reads one of a process's files; some kernels list them to any user.
func mayLook(fds string) error {
	f, err := os.Open(fds)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	names, err := f.Readdirnames(1)
	if err != nil {
		return err
	}
	_, err = os.Readlink(filepath.Join(fds, names[0]))
	return err
}

// kindOf reads the real user and group of a process.
func kindOf(dir string) (k kind, ok bool) {
	b, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return k, false
	}
	found := 0
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "Uid:" && f[0] != "Gid:" {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 32)
		if err != nil {
			return k, false
		}
		if f[0] == "Uid:" {
			k.uid = uint32(n)
		} else {
			k.gid = uint32(n)
		}
		found++
	}
	return k, found == 2
}

// maxName is what the kernel keeps of a process's name, in bytes.
const maxName = 15

// short bounds a name: the helper runs as a user of the sandbox, which may forge its output.
func short(name string) string { return strings.ToValidUTF8(name[:min(len(name), maxName)], "") }

func nameOf(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Dial connects to a port on the loopback, of IPv4 or else of IPv6.
func Dial(ctx context.Context, port uint16) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port).String())
	if err == nil {
		return nc, nil
	}
	if nc, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(netip.IPv6Loopback(), port).String()); err == nil {
		return nc, nil
	}
	return nil, err
}
