package volumetree

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Ref identifies a volume. Its files lie under the name, which no other volume can have before they are gone.
type Ref struct {
	Namespace, Name string
	UID             types.UID
}

// Remote is where the files of a volume are that are no directory of the node.
type Remote struct {
	// Endpoint is a URL with scheme, host and, if need be, port.
	Endpoint, Region, Bucket, Prefix           string
	AccessKeyID, SecretAccessKey, SessionToken string
	// CA has certificates that sign the endpoint's, in PEM. Empty: the system's.
	CA       string
	ReadOnly bool
	// CacheBytes bounds what the node keeps of the files.
	CacheBytes int64
	// NFS is the export of a server that has the files; nil: a bucket has them.
	NFS *RemoteNFS `json:",omitempty"`
}

// RemoteNFS is an export of an NFS server. Ports of 0 are the usual one, and what the server's port mapper says.
type RemoteNFS struct {
	Server, Path    string
	Port, MountPort int
}

// ReasonUploadFailed is the reason of a RemoteError while files wait for another attempt to upload them. All others can be read and written.
const ReasonUploadFailed = "UploadFailed"

// RemoteError is why the files of a volume elsewhere cannot be reached.
type RemoteError struct {
	// Reason is a word for conditions, Message a sentence.
	Reason, Message string
}

func (e *RemoteError) Error() string { return e.Message }

// Unwrap makes it an errs.ErrUnavailable: it is tried again.
func (e *RemoteError) Unwrap() error { return errs.ErrUnavailable }

// Key is the volume's name with its namespace.
func (r Ref) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name}
}
