package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

// RPC serves the filesystem RPCs. It works as root for every user: a client with the token may name any
// user anyway. The user determines the base of relative paths and the owner of new entries.
type RPC struct {
	Users    settings.Users
	Uploads  *Uploads
	Watchers *Watchers
}

var _ filesystempb.FilesystemHandler = (*RPC)(nil)

// place resolves a request's path for its user.
func (s *RPC) place(h http.Header, path string) (account.User, string, error) {
	acc, err := s.Users.Of(h)
	if err != nil {
		return account.User{}, "", err
	}
	_, workdir := s.Users.Settings.Defaults()
	abs, err := account.ResolvePath(path, acc, workdir)
	if err != nil {
		return account.User{}, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return acc, abs, nil
}

// Stat describes one entry.
func (s *RPC) Stat(_ context.Context, req *connect.Request[filesystempb.StatRequest]) (*connect.Response[filesystempb.StatResponse], error) {
	_, path, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	entry, err := describe(path, s.Users.Accounts.Names())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.StatResponse{Entry: entry}), nil
}

// MakeDir makes a directory and its missing parents.
func (s *RPC) MakeDir(_ context.Context, req *connect.Request[filesystempb.MakeDirRequest]) (*connect.Response[filesystempb.MakeDirResponse], error) {
	acc, path, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
	} else if err == nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but it is not a directory: %s", path))
	}
	if err := account.MakeDirs(path, acc); err != nil {
		return nil, fileError(err)
	}
	entry, err := describe(path, s.Users.Accounts.Names())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.MakeDirResponse{Entry: entry}), nil
}

// Move renames an entry.
func (s *RPC) Move(_ context.Context, req *connect.Request[filesystempb.MoveRequest]) (*connect.Response[filesystempb.MoveResponse], error) {
	acc, source, err := s.place(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	_, destination, err := s.place(req.Header(), req.Msg.GetDestination())
	if err != nil {
		return nil, err
	}
	// Looked at first, so that a mistake makes no directories.
	if _, err := os.Lstat(source); err != nil {
		return nil, fileError(err)
	}
	if err := account.MakeDirs(filepath.Dir(destination), acc); err != nil {
		return nil, fileError(err)
	}
	if err := os.Rename(source, destination); err != nil {
		return nil, fileError(err)
	}
	entry, err := describe(destination, s.Users.Accounts.Names())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.MoveResponse{Entry: entry}), nil
}

// Remove deletes an entry and all below it.
func (s *RPC) Remove(_ context.Context, req *connect.Request[filesystempb.RemoveRequest]) (*connect.Response[filesystempb.RemoveResponse], error) {
	_, path, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("path / cannot be removed"))
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&filesystempb.RemoveResponse{}), nil
}

// ListDir describes what is in a directory. Paths begin as the request's does,
// also where that is a link; links below are not followed.
func (s *RPC) ListDir(ctx context.Context, req *connect.Request[filesystempb.ListDirRequest]) (*connect.Response[filesystempb.ListDirResponse], error) {
	_, path, err := s.place(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	dir, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, fileError(linkError(path, err))
	}
	st, err := os.Stat(dir)
	if err != nil {
		return nil, fileError(err)
	}
	if !st.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", path))
	}
	entries, err := walk(ctx, path, dir, max(1, int(req.Msg.GetDepth())), s.Users.Accounts.Names())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.ListDirResponse{Entries: entries}), nil
}

// linkError gives filepath.EvalSymlinks's complaint about a cycle an identity.
func linkError(path string, err error) error {
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return err
	}
	_, serr := os.Stat(path)
	return errors.Join(err, serr)
}

// walk describes what is below a directory, depth levels deep, in lexical
// order. What vanishes meanwhile is left out.
func walk(ctx context.Context, path, dir string, depth int, n account.Names) ([]*filesystempb.EntryInfo, error) {
	var entries []*filesystempb.EntryInfo
	err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if at == dir {
			return err
		}
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		}
		rel, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		if st, err := d.Info(); err == nil && !isStaged(at) {
			entries = append(entries, describeInfo(filepath.Join(path, rel), at, st, n))
		}
		if d.IsDir() && strings.Count(rel, "/")+1 >= depth {
			return fs.SkipDir
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil, reply.ContextError(ctx)
	}
	if err != nil {
		return nil, fileError(err)
	}
	return entries, nil
}

// Kinds of filesystems whose changes by others cannot be watched.
var networkKinds = map[int64]bool{
	unix.NFS_SUPER_MAGIC: true, 0xff534d42 /* CIFS */ : true, 0xfe534d42 /* SMB2 */ : true, 0x517b /* SMB */ : true, 0x65735546 /* FUSE */ : true,
}

// watchable resolves and checks the path of a watch.
func (s *RPC) watchable(h http.Header, path string, network bool) (string, error) {
	_, path, err := s.place(h, path)
	if err != nil {
		return "", err
	}
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", connect.NewError(connect.CodeNotFound, fmt.Errorf("path %s not found", path))
	}
	if err != nil {
		return "", fileError(err)
	}
	if !st.IsDir() {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path %s not a directory", path))
	}
	var kind unix.Statfs_t
	if err := unix.Statfs(path, &kind); err != nil {
		return "", fileError(&os.PathError{Op: "statfs", Path: path, Err: err})
	}
	if networkKinds[kind.Type] && !network {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cannot watch path on network filesystem: %s", path))
	}
	return path, nil
}
