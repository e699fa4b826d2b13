// Nfs exports a directory as /export, on the address of its first argument: an NFS server of version 3 for tests, which serves its mounts at the
// same port. It refuses /denied. A server that is started again knows no handle of the one before.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/go-git/go-billy/v5"
	"github.com/go-git/go-billy/v5/osfs"
	nfs "github.com/willscott/go-nfs"
	"github.com/willscott/go-nfs/helpers"
)

// handles is how many files the server knows at once.
const handles = 1 << 16

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(address, dir string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	files := changing{osfs.New(dir)}
	return nfs.Serve(listener, helpers.NewCachingHandler(&exports{helpers.NewNullAuthHandler(files), files}, handles))
}

// exports has one export.
type exports struct {
	nfs.Handler
	files changing
}

// Mount answers a request for an export.
func (e *exports) Mount(_ context.Context, _ net.Conn, r nfs.MountRequest) (nfs.MountStatus, billy.Filesystem, []nfs.AuthFlavor) {
	switch string(r.Dirpath) {
	case "/export":
		return nfs.MountStatusOk, e.files, []nfs.AuthFlavor{nfs.AuthFlavorUnix}
	case "/denied":
		return nfs.MountStatusErrAcces, e.files, nil
	}
	return nfs.MountStatusErrNoEnt, e.files, nil
}

// changing changes attributes too.
type changing struct{ billy.Filesystem }

func (c changing) path(name string) string { return c.Join(c.Root(), name) }

func (c changing) Chmod(name string, mode os.FileMode) error { return os.Chmod(c.path(name), mode) }

func (c changing) Lchown(name string, uid, gid int) error { return os.Lchown(c.path(name), uid, gid) }

func (c changing) Chown(name string, uid, gid int) error { return os.Chown(c.path(name), uid, gid) }

func (c changing) Chtimes(name string, access, change time.Time) error {
	return os.Chtimes(c.path(name), access, change)
}
