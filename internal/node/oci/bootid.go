package oci

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// gVisor generates a boot ID when it mounts /proc, and keeps it in images: all restores of one
// would share it. So each start mounts its own file of the bundle over it.
const (
	bootIDPath = "/proc/sys/kernel/random/boot_id"
	bootIDName = "boot-id"
)

// renewBootID gives a bundle a new boot ID, if it has one.
func renewBootID(bundle string) error {
	_, err := os.Lstat(filepath.Join(bundle, bootIDName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("renew boot ID: %w", err)
	}
	return writeBootID(bundle)
}

// writeBootID replaces the file; a running container keeps the old one.
func writeBootID(bundle string) error {
	path := filepath.Join(bundle, bootIDName)
	if err := os.WriteFile(path+".new", []byte(newUUID()+"\n"), 0o444); err != nil {
		return fmt.Errorf("write boot ID: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write boot ID: %w", err)
	}
	return nil
}

func newUUID() string {
	var u [16]byte
	_, _ = rand.Read(u[:]) // never fails
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
