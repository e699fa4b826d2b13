package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

// describe describes one entry by its path. A link is
// described as such, with where it leads.
func describe(path string, n account.Names) (*filesystempb.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, fileError(err)
	}
	return describeInfo(path, path, st, n), nil
}

// describeInfo is describe for an entry at another path whose status is known. A link has the type and
// mode of what it leads to, and its own where what it leads to does not exist.
func describeInfo(path, at string, st os.FileInfo, n account.Names) *filesystempb.EntryInfo {
	e := &filesystempb.EntryInfo{
		Name: filepath.Base(path), Type: typeOf(st.Mode()), Path: path,
		Size: st.Size(), Mode: uint32(st.Mode().Perm()), Permissions: st.Mode().String(),
		ModifiedTime: timestamppb.New(st.ModTime()),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = n.Owner(sys.Uid, sys.Gid)
	}
	switch {
	case st.Mode()&os.ModeSymlink != 0:
		e.SymlinkTarget = linkTarget(at)
		if target, err := os.Stat(at); err == nil {
			e.Type, e.Mode = typeOf(target.Mode()), uint32(target.Mode().Perm())
		}
	case st.Mode().IsRegular():
		e.Metadata = readMetadata(at)
	}
	return e
}

func typeOf(mode os.FileMode) filesystempb.FileType {
	switch {
	case mode.IsRegular():
		return filesystempb.FileType_FILE_TYPE_FILE
	case mode.IsDir():
		return filesystempb.FileType_FILE_TYPE_DIRECTORY
	case mode&os.ModeSymlink != 0:
		return filesystempb.FileType_FILE_TYPE_SYMLINK
	}
	return filesystempb.FileType_FILE_TYPE_UNSPECIFIED
}

// linkTarget is where a link leads in the end, or, if that does not exist,
// its own target, made absolute.
func linkTarget(path string) *string {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		target, err = os.Readlink(path)
		if err != nil {
			return nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
	}
	return &target
}

// readMetadata reads what was given at the upload; nil if nothing was, or if
// the filesystem keeps no attributes.
func readMetadata(path string) map[string]string {
	var m map[string]string
	for _, name := range xattrNames(path) {
		key, ok := strings.CutPrefix(name, envd.XattrMetadataPrefix)
		if !ok || key == "" {
			continue
		}
		buf := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, buf)
		if err != nil {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = string(buf[:n])
	}
	return m
}

func xattrNames(path string) []string {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size == 0 {
		return nil
	}
	buf := make([]byte, size+1024) // more may come meanwhile
	size, err = unix.Llistxattr(path, buf)
	if err != nil || size == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(buf[:size]), "\x00"), "\x00")
}

// fileError gives an error of the filesystem its code.
func fileError(err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, os.ErrNotExist):
		code = connect.CodeNotFound
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EINVAL),
		errors.Is(err, syscall.ENAMETOOLONG):
		code = connect.CodeInvalidArgument
	case errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EXDEV),
		errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EROFS):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = connect.CodeResourceExhausted
	case errors.Is(err, os.ErrPermission):
		code = connect.CodePermissionDenied
	}
	return connect.NewError(code, fmt.Errorf("file: %w", err))
}
