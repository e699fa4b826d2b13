package apart

import (
	"errors"
	"fmt"
	"os"
	osuser "os/user"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/config"
)

const (
	// UserName is the user of the server's process, which packages make.
	UserName = "barchan"
	// unnamed is its ID and its group's where there is no such user. Neither Debian nor systemd gives it to anyone.
	unnamed = 60700
)

type user struct{ uid, gid int }

// lookupUser returns the user of a name, or unnamed.
func lookupUser(name string) (user, error) {
	u, err := osuser.Lookup(name)
	if unknown := osuser.UnknownUserError(""); errors.As(err, &unknown) {
		return user{unnamed, unnamed}, nil
	}
	if err != nil {
		return user{}, fmt.Errorf("look up user %s: %w", name, err)
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err := errors.Join(err1, err2); err != nil {
		return user{}, fmt.Errorf("look up user %s: %w", name, err)
	}
	if uid == 0 || gid == 0 {
		return user{}, fmt.Errorf("privileges: the user %s is root, or in its group; give it another ID: %w", name, errs.ErrInvalid)
	}
	return user{uid, gid}, nil
}

// checkWay reports whether the user can reach a path, by the modes of the directories above it.
func (u user) checkWay(key, path string) error {
	for at := filepath.Dir(path); ; at = filepath.Dir(at) {
		if open, err := u.may(at, 0o111); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		} else if !open {
			return fmt.Errorf("%s: %s is closed to the user %d of the server; choose another place, or open the way with `chmod o+x %s`: %w", key, at, u.uid, at, errs.ErrForbidden)
		}
		if at == string(os.PathSeparator) {
			return nil
		}
	}
}

// may reports whether the mode of a file gives the user some of bits, which are those of owner, group and others.
func (u user) may(path string, bits uint32) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	class := uint32(0o007)
	switch {
	case int(st.Uid) == u.uid:
		class = 0o700
	case int(st.Gid) == u.gid:
		class = 0o070
	}
	return st.Mode&bits&class != 0, nil
}

// checkFiles reports a file of the operator's that the server's process could not read.
func (u user) checkFiles(cfg *config.Config) error {
	for _, f := range []struct{ key, path string }{
		{"tlsCert", cfg.TLSCert},
		{"tlsKey", cfg.TLSKey},
		{"sshHostKey", cfg.SSHHostKey},
		{"acmeCA", cfg.ACMECA},
		{"acmeUpdateKeyFile", cfg.ACMEUpdateKeyFile},
		{"etcdCA", cfg.EtcdCA},
		{"etcdCert", cfg.EtcdCert},
		{"etcdKey", cfg.EtcdKey},
		{"peerDir", cfg.PeerDir},
	} {
		if f.path == "" {
			continue
		}
		if err := u.checkWay(f.key, f.path); err != nil {
			return err
		}
		if open, err := u.may(f.path, 0o444); err == nil && !open {
			return fmt.Errorf("%s: %s cannot be read by the user %d of the server; `chgrp %d %s` and `chmod g+r %s`: %w", f.key, f.path, u.uid, u.gid, f.path, f.path, errs.ErrForbidden)
		}
	}
	return nil
}
