package memstore

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// encrypts reports whether the file system of a directory can encrypt it.
func encrypts(dir string) (bool, error) {
	arg := unix.FscryptGetPolicyExArg{Size: uint64(len(unix.FscryptGetPolicyExArg{}.Policy))}
	err := ioctl(dir, unix.FS_IOC_GET_ENCRYPTION_POLICY_EX, unsafe.Pointer(&arg))
	switch {
	case err == nil || errors.Is(err, unix.ENODATA):
		return true, nil
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL):
		return false, nil
	}
	return false, err
}

// addKey gives a key to the kernel, for the file system of a directory, until that is unmounted. It returns the key's identifier,
// which the kernel derives.
func addKey(dir string, key []byte) (identifier string, err error) {
	var arg struct { // struct fscrypt_add_key_arg, which ends with the key
		unix.FscryptAddKeyArg
		key [keySize]byte
	}
	arg.Key_spec.Type, arg.Raw_size = unix.FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER, keySize
	copy(arg.key[:], key)
	if err := ioctl(dir, unix.FS_IOC_ADD_ENCRYPTION_KEY, unsafe.Pointer(&arg)); err != nil {
		return "", noSupport(err)
	}
	return hex.EncodeToString(arg.Key_spec.U[:16]), nil
}

// encrypt has the kernel encrypt all that is created in an empty directory. It may be repeated with the same key; another, or content
// in the clear, is an error.
func encrypt(dir, identifier string) error {
	policy := unix.FscryptPolicyV2{
		Version: unix.FSCRYPT_POLICY_V2, Contents_encryption_mode: unix.FSCRYPT_MODE_AES_256_XTS,
		Filenames_encryption_mode: unix.FSCRYPT_MODE_AES_256_CTS, Flags: unix.FSCRYPT_POLICY_FLAGS_PAD_32,
	}
	id, err := hex.DecodeString(identifier)
	if err != nil {
		return err
	}
	copy(policy.Master_key_identifier[:], id)
	return noSupport(ioctl(dir, unix.FS_IOC_SET_ENCRYPTION_POLICY, unsafe.Pointer(&policy)))
}

func noSupport(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) {
		return fmt.Errorf("the kernel cannot encrypt (CONFIG_FS_ENCRYPTION); set memoryEncryption to false: %w: %w", err, errs.ErrUnavailable)
	}
	return err
}

func ioctl(dir string, request uintptr, arg unsafe.Pointer) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return &os.PathError{Op: "ioctl", Path: dir, Err: errno}
	}
	return nil
}
