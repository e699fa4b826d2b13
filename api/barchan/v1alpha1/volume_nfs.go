package v1alpha1

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const (
	maxNFSPath    = 1024
	maxNFSOptions = 16
)

// nfsOptions are mount options that say what is so in any case.
var nfsOptions = []string{"nfsvers=3", "vers=3", "proto=tcp", "tcp", "soft", "nolock"}

// Ports returns the ports of an export's options; 0: not given.
func (s *NFSVolumeSource) Ports() (port, mountPort int, err error) {
	for _, o := range s.MountOptions {
		name, value, _ := strings.Cut(o, "=")
		to := &port
		switch {
		case slices.Contains(nfsOptions, o):
			continue
		case name == "mountport":
			to = &mountPort
		case name != "port":
			return 0, 0, fmt.Errorf("%.80q is none of %s, port=N and mountport=N", o, strings.Join(nfsOptions, ", "))
		}
		if *to, err = strconv.Atoi(value); err != nil || *to < 1 || *to > 65535 {
			return 0, 0, fmt.Errorf("%.80q needs a port from 1 to 65535", o)
		}
	}
	return port, mountPort, nil
}

// validateNFS checks where the files are.
func validateNFS(v *Volume, spec *field.Path) (errs field.ErrorList) {
	nfs, at := v.Spec.NFS, spec.Child("nfs")
	switch {
	case nfs == nil && v.Spec.StorageClassName == StorageNFS:
		return field.ErrorList{field.Required(at, "storageClassName is nfs")}
	case nfs == nil:
		return nil
	case v.Spec.StorageClassName != StorageNFS:
		return field.ErrorList{field.Forbidden(at, "goes with storageClassName nfs alone")}
	}
	if _, err := netip.ParseAddr(nfs.Server); err != nil && len(validation.IsDNS1123Subdomain(nfs.Server)) > 0 {
		errs = append(errs, field.Invalid(at.Child("server"), nfs.Server, "must be a name or an address"))
	}
	if p := nfs.Path; !strings.HasPrefix(p, "/") || len(p) > maxNFSPath || path.Clean(p) != p || !utf8.ValidString(p) || strings.ContainsRune(p, 0) {
		errs = append(errs, field.Invalid(at.Child("path"), p, "must be a clean absolute path of at most 1024 bytes"))
	}
	if len(nfs.MountOptions) > maxNFSOptions {
		errs = append(errs, field.TooMany(at.Child("mountOptions"), len(nfs.MountOptions), maxNFSOptions))
	} else if _, _, err := nfs.Ports(); err != nil {
		errs = append(errs, field.Invalid(at.Child("mountOptions"), nfs.MountOptions, err.Error()))
	}
	return errs
}
