// Package account finds users, groups and paths of a sandbox in its files, as a static program cannot
// call the C library. It authorizes nothing and caches nothing: programs add users at any time.
//
// It has no locks.
package account

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/guest/agent/plainfile"
)

// errNoUser means that the files have no such user.
var errNoUser = errors.New("no such user")

// User is a user with the properties of its processes.
type User struct {
	Name     string
	UID, GID uint32
	Home     string
	Groups   []uint32
}

// Database is the files of users and groups. Each call reads them again.
type Database struct{ Passwd, Group string }

// System reads the sandbox's own files.
func System() Database { return Database{"/etc/passwd", "/etc/group"} }

// Lookup finds a user by name. There is always a root, even without files.
func (a Database) Lookup(name string) (User, error) {
	acc, err := a.find(name, func(f []string) bool { return f[0] == name })
	if name == "root" && errors.Is(err, errNoUser) {
		return User{Name: name, Home: "/", Groups: []uint32{0}}, nil
	}
	return acc, err
}

// Resolve finds a user as image configurations name it: a name or an ID, with
// ":group" if wanted. An ID needs no entry.
func (a Database) Resolve(spec string) (User, error) {
	name, group, _ := strings.Cut(spec, ":")
	acc, err := a.Lookup(name)
	if errors.Is(err, errNoUser) {
		uid, perr := strconv.ParseUint(name, 10, 32)
		if perr != nil {
			return User{}, err
		}
		acc, err = a.find(name, func(f []string) bool { return f[2] == name })
		if errors.Is(err, errNoUser) {
			acc, err = User{Name: name, UID: uint32(uid), Home: "/"}, nil
		}
	}
	if err != nil || group == "" {
		return acc, err
	}
	gid, err := a.groupID(group)
	if err != nil {
		return User{}, err
	}
	acc.GID, acc.Groups = gid, nil
	return acc, nil
}

func (a Database) find(name string, match func(fields []string) bool) (User, error) {
	var acc User
	found := false
	err := eachLine(a.Passwd, 6, func(f []string) bool {
		if !match(f) {
			return true
		}
		uid, uerr := strconv.ParseUint(f[2], 10, 32)
		gid, gerr := strconv.ParseUint(f[3], 10, 32)
		if uerr != nil || gerr != nil {
			return true
		}
		acc = User{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5]}
		found = true
		return false
	})
	if err != nil {
		return User{}, err
	}
	if !found {
		return User{}, fmt.Errorf("%w: %q", errNoUser, name)
	}
	if acc.Home == "" {
		acc.Home = "/"
	}
	acc.Groups, err = a.memberships(acc)
	return acc, err
}

// memberships lists the supplementary groups.
func (a Database) memberships(acc User) ([]uint32, error) {
	gids := []uint32{acc.GID}
	err := eachLine(a.Group, 4, func(f []string) bool {
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err == nil && slices.Contains(strings.Split(f[3], ","), acc.Name) && !slices.Contains(gids, uint32(gid)) {
			gids = append(gids, uint32(gid))
		}
		return true
	})
	return gids, err
}

func (a Database) groupID(group string) (uint32, error) {
	id, err := strconv.ParseUint(group, 10, 32)
	found := err == nil
	err = eachLine(a.Group, 3, func(f []string) bool {
		if f[0] != group {
			return true
		}
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err == nil {
			id, found = gid, true
		}
		return err != nil
	})
	if err == nil && !found {
		err = fmt.Errorf("no such group: %q", group)
	}
	return uint32(id), err
}

// Names has the names of IDs, for describing many files at once.
type Names struct{ users, groups map[uint32]string }

// Names reads all names at once.
func (a Database) Names() Names {
	read := func(file string) map[uint32]string {
		m := map[uint32]string{}
		// Without a readable file, Owner returns numbers.
		_ = eachLine(file, 3, func(f []string) bool {
			id, err := strconv.ParseUint(f[2], 10, 32)
			if _, ok := m[uint32(id)]; err == nil && !ok {
				m[uint32(id)] = f[0]
			}
			return true
		})
		return m
	}
	return Names{users: read(a.Passwd), groups: read(a.Group)}
}

// Owner names a user and a group; an unknown ID is its number.
func (n Names) Owner(uid, gid uint32) (string, string) {
	name := func(m map[uint32]string, id uint32) string {
		if s, ok := m[id]; ok {
			return s
		}
		return strconv.FormatUint(uint64(id), 10)
	}
	return name(n.users, uid), name(n.groups, gid)
}

// eachLine calls each with the fields of every line that has at least min of
// them, until it returns false. A missing file has no lines.
func eachLine(file string, minimum int, each func(fields []string) bool) error {
	f, err := plainfile.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open accounts: %w", err)
	}
	defer func() { _ = f.Close() }()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Split(sc.Text(), ":")
		if len(fields) >= minimum && !strings.HasPrefix(fields[0], "#") && !each(fields) {
			break
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	return nil
}
