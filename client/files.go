package client

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

// Files reads and changes the files of a sandbox. Relative paths begin at the user's home.
type Files struct {
	agent   *envd.Client
	sandbox *Sandbox
	user    string
}

// FileType is what a path is.
type FileType string

// The types of files; another one is empty.
const (
	TypeFile      FileType = "file"
	TypeDirectory FileType = "dir"
	TypeSymlink   FileType = "symlink"
)

// EntryInfo describes a file, directory or symbolic link.
type EntryInfo struct {
	Name string
	Path string
	Type FileType
	Size int64 // bytes
	// Mode has the permission bits, Permissions the text of ls.
	Mode         fs.FileMode
	Permissions  string
	Owner, Group string
	ModTime      time.Time
	// SymlinkTarget is where a link leads in the end.
	SymlinkTarget string
	// Metadata was given to [Files.Write].
	Metadata map[string]string
}

// WriteOptions are those of [Files.Write].
type WriteOptions struct {
	// Metadata is kept with the file.
	Metadata map[string]string
}

// Read returns the content of a file.
func (f *Files) Read(ctx context.Context, path string) ([]byte, error) {
	in, err := f.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }() // it was only read
	content, err := io.ReadAll(in)
	return content, guestError(ctx, "read file", err)
}

// Open returns a stream of the content of a file, which ends with ctx; the caller closes it.
func (f *Files) Open(ctx context.Context, path string) (io.ReadCloser, error) {
	in, err := f.agent.Download(ctx, path)
	return in, guestError(ctx, "open file", err)
}

// Write writes a file and the directories above it. A file of that name is replaced, at once or not at all.
func (f *Files) Write(ctx context.Context, path string, content io.Reader, o WriteOptions) error {
	_, err := f.agent.Upload(ctx, path, content, o.Metadata)
	return guestError(ctx, "write file", err)
}

// WriteString is Write of a text.
func (f *Files) WriteString(ctx context.Context, path, text string) error {
	return f.Write(ctx, path, strings.NewReader(text), WriteOptions{})
}

// List describes what is in a directory, depth levels deep; zero: one.
func (f *Files) List(ctx context.Context, path string, depth int) ([]EntryInfo, error) {
	res, err := f.agent.Filesystem().ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: path, Depth: uint32(max(1, depth))}))
	if err != nil {
		return nil, guestError(ctx, "list directory", err)
	}
	list := []EntryInfo{}
	for _, e := range res.Msg.GetEntries() {
		list = append(list, entryInfo(e))
	}
	return list, nil
}

// Info describes a file.
func (f *Files) Info(ctx context.Context, path string) (EntryInfo, error) {
	res, err := f.agent.Filesystem().Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: path}))
	if err != nil {
		return EntryInfo{}, guestError(ctx, "describe file", err)
	}
	return entryInfo(res.Msg.GetEntry()), nil
}

// Exists reports whether a path exists.
func (f *Files) Exists(ctx context.Context, path string) (bool, error) {
	_, err := f.Info(ctx, path)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// MakeDir makes a directory and those above it; one that exists is an [ErrConflict].
func (f *Files) MakeDir(ctx context.Context, path string) error {
	_, err := f.agent.Filesystem().MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: path}))
	return guestError(ctx, "make directory", err)
}

// Rename moves a file or a directory.
func (f *Files) Rename(ctx context.Context, from, to string) (EntryInfo, error) {
	res, err := f.agent.Filesystem().Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: from, Destination: to}))
	if err != nil {
		return EntryInfo{}, guestError(ctx, "rename file", err)
	}
	return entryInfo(res.Msg.GetEntry()), nil
}

// Remove deletes a file, or a directory and all in it; a path that does not exist is no error.
func (f *Files) Remove(ctx context.Context, path string) error {
	_, err := f.agent.Filesystem().Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: path}))
	return guestError(ctx, "remove file", err)
}

// DownloadURL returns a URL by which its bearer reads a file, for a time; zero: as long as the sandbox lives. Where
// [Sandbox.Address] has headers, and the server no domain, the request needs them.
func (f *Files) DownloadURL(path string, life time.Duration) string {
	return f.sandbox.fileURL(path, envd.OpRead, f.user, life)
}

// UploadURL is DownloadURL for a POST of a file.
func (f *Files) UploadURL(path string, life time.Duration) string {
	return f.sandbox.fileURL(path, envd.OpWrite, f.user, life)
}

func entryInfo(e *filesystempb.EntryInfo) EntryInfo {
	types := map[filesystempb.FileType]FileType{
		filesystempb.FileType_FILE_TYPE_FILE: TypeFile, filesystempb.FileType_FILE_TYPE_DIRECTORY: TypeDirectory, filesystempb.FileType_FILE_TYPE_SYMLINK: TypeSymlink,
	}
	return EntryInfo{
		Name: e.GetName(), Path: e.GetPath(), Type: types[e.GetType()], Size: e.GetSize(), Mode: fs.FileMode(e.GetMode()), Permissions: e.GetPermissions(),
		Owner: e.GetOwner(), Group: e.GetGroup(), ModTime: e.GetModifiedTime().AsTime(), SymlinkTarget: e.GetSymlinkTarget(), Metadata: e.GetMetadata(),
	}
}

// EventType is what happened to a file.
type EventType string

// The types of events.
const (
	EventCreate EventType = "create"
	EventWrite  EventType = "write"
	EventRemove EventType = "remove"
	EventRename EventType = "rename"
	EventChmod  EventType = "chmod"
)

// Event is a change in a directory.
type Event struct {
	// Name is relative to the directory.
	Name string
	Type EventType
}

// WatchOptions are those of [Files.Watch].
type WatchOptions struct {
	// Recursive watches the directories below too.
	Recursive bool
}

// Watcher has the changes of a directory. It is not safe for concurrent use, but for Close.
type Watcher struct {
	ctx    context.Context //nolint:containedctx // of the stream
	cancel context.CancelFunc
	stream *connect.ServerStreamForClient[filesystempb.WatchDirResponse]
}

// Watch returns once changes of a directory are noticed. The stream ends with ctx, or by [Watcher.Close].
func (f *Files) Watch(ctx context.Context, path string, o WatchOptions) (*Watcher, error) {
	ctx, cancel := context.WithCancel(ctx)
	req := connect.NewRequest(&filesystempb.WatchDirRequest{Path: path, Recursive: o.Recursive})
	req.Header().Set(envd.HeaderKeepalive, keepalive)
	stream, err := f.agent.Filesystem().WatchDir(ctx, req)
	if err != nil {
		cancel()
		return nil, guestError(ctx, "watch directory", err)
	}
	w := &Watcher{ctx, cancel, stream}
	if !stream.Receive() {
		defer w.Close()
		return nil, w.end()
	}
	return w, nil
}

// Next returns the next change. It blocks until there is one; after Close, or the end of the context, its error is that of the context.
func (w *Watcher) Next() (Event, error) {
	for w.stream.Receive() {
		if e := w.stream.Msg().GetFilesystem(); e != nil {
			kind := strings.ToLower(strings.TrimPrefix(e.GetType().String(), "EVENT_TYPE_"))
			return Event{Name: e.GetName(), Type: EventType(kind)}, nil
		}
	}
	return Event{}, w.end()
}

func (w *Watcher) end() error {
	err := w.stream.Err()
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return guestError(w.ctx, "watch directory", err)
}

// Close ends the watch.
func (w *Watcher) Close() {
	w.cancel()
	_ = w.stream.Close() // it is cut
}
