package template

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client"
)

// Options is the request for a template's build.
type Options struct {
	Name     string `json:"name"`               // of the template, optionally with a tag
	CPUCount int    `json:"cpuCount,omitempty"` // of its sandboxes; zero: the server's default
	MemoryMB int64  `json:"memoryMB,omitempty"` // MiB, likewise
}

// Info names a build that waits for its steps.
type Info struct {
	TemplateID string `json:"templateID"`
	BuildID    string `json:"buildID"`
}

// Spec has a build's steps. Either an image or a template is required.
type Spec struct {
	FromImage    string `json:"fromImage,omitempty"`
	FromTemplate string `json:"fromTemplate,omitempty"`
	// Registry has the credentials of FromImage, and of the stages' images of the same registry; nil: none.
	Registry *Registry `json:"fromImageRegistry,omitempty"`
	Stages   []Stage   `json:"stages,omitempty"`
	Steps    []Step    `json:"steps"`
	// Secrets are kept in the server's memory until the build ends.
	Secrets  map[string][]byte `json:"secrets,omitempty"`
	StartCmd string            `json:"startCmd,omitempty"`
	ReadyCmd string            `json:"readyCmd,omitempty"`
	// Force runs steps although their results are kept.
	Force bool `json:"force"`
}

// Stage is a chain of steps whose files others take.
type Stage struct {
	Name         string `json:"name"`
	FromImage    string `json:"fromImage,omitempty"`
	FromTemplate string `json:"fromTemplate,omitempty"`
	// Registry has the credentials of FromImage, in the place of the build's; nil: those of the build.
	Registry *Registry `json:"fromImageRegistry,omitempty"`
	Steps    []Step    `json:"steps,omitempty"`
}

// Registry are the credentials of an image's registry.
type Registry struct {
	Type     string `json:"type"` // registry, or gcp with ServiceAccountJSON
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"` //nolint:gosec // the field's name is the API's
	// ServiceAccountJSON is the key of a Google service account.
	ServiceAccountJSON string `json:"serviceAccountJson,omitempty"`
}

// Types of steps.
const (
	StepRun     = "RUN"     // the command
	StepCopy    = "COPY"    // source, destination, owner, octal mode
	StepWorkdir = "WORKDIR" // the path
	StepUser    = "USER"    // the name
	StepEnv     = "ENV"     // names and values in turn
)

// Step is one step.
type Step struct {
	Type string   `json:"type"` // RUN, COPY, WORKDIR, USER or ENV
	Args []string `json:"args"`
	// FilesHash names the uploaded files of a COPY.
	FilesHash string `json:"filesHash,omitempty"`
	// From has the files of a COPY that are a stage's, Mounts what a RUN sees besides its files, and Network what it reaches.
	From    *StageFiles `json:"from,omitempty"`
	Mounts  []Mount     `json:"mounts,omitempty"`
	Network string      `json:"network,omitempty"`
	Force   bool        `json:"force"`
}

// StageFiles are files of a stage that a COPY takes.
type StageFiles struct {
	// Stage is the name of an earlier stage.
	Stage string `json:"stage"`
	// Paths are more sources, besides that of the arguments. Wildcards are allowed in all.
	Paths []string `json:"paths,omitempty"`
	// Exclude are patterns of .dockerignore, relative to the sources.
	Exclude []string `json:"exclude,omitempty"`
	// Parents keeps the sources' directories, from the root or from "/./" in their paths.
	Parents bool `json:"parents,omitempty"`
}

// Types of a [Mount].
const (
	MountCache  = "Cache"
	MountBind   = "Bind"
	MountTmpfs  = "Tmpfs"
	MountSecret = "Secret"
)

// NetworkNone is a RUN without network.
const NetworkNone = "None"

// Mount is what a RUN sees besides its files.
type Mount struct {
	Type   string `json:"type"`
	Target string `json:"target,omitempty"`
	// ID names a cache, by default its target, or a secret.
	ID      string `json:"id,omitempty"`
	Sharing string `json:"sharing,omitempty"` // of a cache: Shared, Private or Locked
	// Stage or FilesHash has the files of a bind, and Source is their path in it.
	Stage     string `json:"stage,omitempty"`
	FilesHash string `json:"filesHash,omitempty"`
	Source    string `json:"source,omitempty"`
	Owner     string `json:"owner,omitempty"` // IDs of user and group, with ":" between them
	Mode      string `json:"mode,omitempty"`  // octal
	// SizeBytes bounds a tmpfs.
	SizeBytes int64 `json:"sizeBytes,omitempty"`
	// Env is a variable that has a secret, in the place of a file.
	Env string `json:"env,omitempty"`
	// Required fails the build if the secret is missing.
	Required bool `json:"required,omitempty"`
}

// Files says whether the server has the files of a COPY, and where to send them.
type Files struct {
	Present bool              `json:"present"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
}

// Stages of a build in Status.
const (
	StatusReady = "ready"
	StatusError = "error"
)

// Status is a build's stage and a part of its log.
type Status struct {
	Status     string     `json:"status"` // waiting, building, ready or error
	LogEntries []LogEntry `json:"logEntries"`
	Reason     *Reason    `json:"reason"` // of an error
}

// LogEntry is one line of a build's log.
type LogEntry struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"` // debug, info, warn or error
	Message   string    `json:"message"`
	// Step is its number from 1, or base, or finalize; empty: unknown.
	Step string `json:"step"`
}

// Reason is why a build failed.
type Reason struct {
	Message string `json:"message"`
	Step    string `json:"step"`
}

// Request announces a build.
func Request(ctx context.Context, c *client.Client, n Options) (Info, error) {
	return fetch[Info](ctx, c, http.MethodPost, "/v3/templates", n)
}

// FilesURL asks for the files of a hash.
func FilesURL(ctx context.Context, c *client.Client, templateID, hash string) (Files, error) {
	return fetch[Files](ctx, c, http.MethodGet, "/templates/"+url.PathEscape(templateID)+"/files/"+url.PathEscape(hash), nil)
}

// Upload sends an archive of size bytes to where Files says, without the key.
func Upload(ctx context.Context, c *client.Client, to Files, archive io.Reader, size int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, to.URL, archive)
	if err != nil {
		return fmt.Errorf("upload files: the server's URL: %w", err)
	}
	for name, value := range to.Headers {
		if !strings.EqualFold(name, "Content-Length") {
			req.Header.Set(name, value)
		}
	}
	req.ContentLength = size
	res, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("upload files: %w: %w", err, client.ErrUnavailable)
	}
	if err := client.CheckResponse(res); err != nil {
		return fmt.Errorf("upload files: %w", err)
	}
	return res.Body.Close()
}

// Start starts a build whose files are uploaded.
func Start(ctx context.Context, c *client.Client, b Info, s Spec) error {
	return c.Call(ctx, http.MethodPost, "/v2"+b.path(), nil, s, nil)
}

// ReadStatus reads a build's stage, and its log after offset entries.
func ReadStatus(ctx context.Context, c *client.Client, b Info, offset int) (Status, error) {
	var out Status
	err := c.Call(ctx, http.MethodGet, b.path()+"/status", url.Values{"logsOffset": {strconv.Itoa(offset)}}, nil, &out)
	return out, err
}

// Cancel ends a build that runs or waits for its steps; one that has ended is an [client.ErrConflict].
func Cancel(ctx context.Context, c *client.Client, b Info) error {
	return c.Call(ctx, http.MethodDelete, b.path(), nil, nil, nil)
}

func (b Info) path() string {
	return "/templates/" + url.PathEscape(b.TemplateID) + "/builds/" + url.PathEscape(b.BuildID)
}
