package memstore

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cheap reports whether the kernel encrypts files, and by instructions of the processor: a processor then encrypts gigabytes a second,
// otherwise about 120 MiB.
func Cheap() bool {
	if _, err := os.Stat("/sys/fs/ext4/features/encryption"); err != nil {
		return false
	}
	// The kernel loads the module of a cipher when it is first asked for.
	if fd, err := unix.Socket(unix.AF_ALG, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0); err == nil {
		_ = unix.Bind(fd, &unix.SockaddrALG{Type: "skcipher", Name: cipher})
		_ = unix.Close(fd)
	}
	f, err := os.Open("/proc/crypto")
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return isAccelerated(f)
}

// cipher is the kernel's name of AES-256-XTS.
const cipher = "xts(aes)"

// isAccelerated reports whether the kernel's choice for the cipher, in the format of /proc/crypto, uses instructions for AES. Drivers
// of a processor implement the whole mode and are named so, such as xts-aes-vaes-avx2 or xts-aes-ce. All others are built of parts,
// and their names show that, such as xts(ecb(aes-generic)).
func isAccelerated(r io.Reader) bool {
	var name, driver, best string
	most := -1
	for lines := bufio.NewScanner(r); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "name":
			name = value
		case "driver":
			driver = value
		case "priority":
			if n, err := strconv.Atoi(value); err == nil && name == cipher && n > most {
				best, most = driver, n
			}
		}
	}
	return strings.HasPrefix(best, "xts-aes-")
}
