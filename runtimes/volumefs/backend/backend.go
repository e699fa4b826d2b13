// Package backend has what the backends of volumefs share: the configuration, the answer to the node, and the bounds of calls.
package backend

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
)

// Reasons of an Answer; the volume's condition has them.
const (
	ReasonInvalid     = "Invalid"
	ReasonBucket      = "BucketNotFound"
	ReasonDenied      = "AccessDenied"
	ReasonUnreachable = "EndpointUnreachable"
	ReasonRefused     = "EndpointRefused"
	ReasonBackend     = "BackendFailed"
	ReasonUpload      = "UploadFailed"
	ReasonExport      = "ExportNotFound"
)

const (
	// CheckTimeout bounds a check, ConnectTimeout a connection to the backend.
	CheckTimeout   = 5 * time.Second
	ConnectTimeout = 3 * time.Second
	maxMessage     = 300
)

// UploadPrefix begins the names of files that the node renames when they are whole. They are not uploaded before, nor listed.
const UploadPrefix = ".barchan-upload-"

// ErrRefused means that the backend has an address that the configuration denies.
var ErrRefused = errors.New("the endpoint's address is not public, and the server's setting volumeEndpoints does not allow it")

// Config is what the node sends.
type Config struct {
	Endpoint, Region, Bucket, Prefix string
	AccessKeyID, SecretAccessKey     string
	SessionToken                     string `json:",omitempty"`
	// CA has certificates that sign the endpoint's, in PEM. Empty: the system's.
	CA       string `json:",omitempty"`
	ReadOnly bool
	// NFS is an export, in place of a bucket.
	NFS *NFSConfig `json:",omitempty"`
	// User is the ID of the user that the process goes on as.
	User int
	// Cache is a directory of that user, which becomes the root. CacheBytes bounds what it keeps of files that are not open and uploaded.
	Cache      string
	CacheBytes int64
	// Denied are addresses that the endpoint may not have.
	Denied []netip.Prefix
	// UID and GID own the files.
	UID, GID uint32
}

// NFSConfig is an export of an NFS server. Ports of 0 are the usual one, and what the server's port mapper says.
type NFSConfig struct {
	Server, Path    string
	Port, MountPort int
}

// Backend has the files.
type Backend interface {
	Root() fs.InodeEmbedder
	// Check asks the backend whether it can be reached.
	Check(ctx context.Context) Answer
	// Waiting counts files that are not at the backend yet, and those of them whose last upload has failed.
	Waiting() (all, failures int)
	// Drain uploads them, as far as that works in time.
	Drain(limit time.Duration)
	// Health is what bounds the calls.
	Health() *Calls
}

// Answer is whether the bucket can be reached. Reason is empty if so.
type Answer struct {
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Waiting is the number of files that have not been uploaded.
	Waiting int `json:"waiting,omitempty"`
}

// Shorten returns the text of an error as an Answer has it.
func Shorten(err error) string {
	text := strings.ToValidUTF8(err.Error(), "?")
	return text[:min(len(text), maxMessage)]
}
