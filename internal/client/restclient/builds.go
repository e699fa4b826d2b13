package restclient

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// NewBuild is the request for a template's build.
type NewBuild struct {
	Name     string `json:"name"`               // of the template, optionally with a tag
	CPUCount int    `json:"cpuCount,omitempty"` // of its sandboxes; zero: the server's default
	MemoryMB int64  `json:"memoryMB,omitempty"` // MiB, likewise
}

// Build is a build that waits for its steps.
type Build struct {
	TemplateID string `json:"templateID"`
	BuildID    string `json:"buildID"`
}

// BuildStart has a build's steps. Either an image or a template is required.
type BuildStart struct {
	FromImage    string       `json:"fromImage,omitempty"`
	FromTemplate string       `json:"fromTemplate,omitempty"`
	Stages       []BuildStage `json:"stages,omitempty"`
	Steps        []BuildStep  `json:"steps"`
	// Secrets are kept in the server's memory until the build ends.
	Secrets  map[string][]byte `json:"secrets,omitempty"`
	StartCmd string            `json:"startCmd,omitempty"`
	ReadyCmd string            `json:"readyCmd,omitempty"`
	// Force runs steps although their results are kept.
	Force bool `json:"force"`
}

// BuildStage is a chain of steps whose files others take.
type BuildStage struct {
	Name         string      `json:"name"`
	FromImage    string      `json:"fromImage,omitempty"`
	FromTemplate string      `json:"fromTemplate,omitempty"`
	Steps        []BuildStep `json:"steps,omitempty"`
}

// BuildStep is one step.
type BuildStep struct {
	Type string   `json:"type"` // RUN, COPY, WORKDIR, USER or ENV
	Args []string `json:"args"`
	// FilesHash names the uploaded files of a COPY.
	FilesHash string `json:"filesHash,omitempty"`
	// From has the files of a COPY that are a stage's, Mounts what a RUN sees besides its files, and Network what it reaches.
	From    *barchan.StageFiles  `json:"from,omitempty"`
	Mounts  []barchan.BuildMount `json:"mounts,omitempty"`
	Network barchan.BuildNetwork `json:"network,omitempty"`
	Force   bool                 `json:"force"`
}

// BuildFiles says whether the server has the files of a COPY, and where to send them.
type BuildFiles struct {
	Present bool              `json:"present"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
}

// Stages of a build in BuildStatus.
const (
	BuildReady = "ready"
	BuildError = "error"
)

// BuildStatus is a build's stage and a part of its log.
type BuildStatus struct {
	Status     string          `json:"status"` // waiting, building, ready or error
	LogEntries []BuildLogEntry `json:"logEntries"`
	Reason     *BuildReason    `json:"reason"` // of an error
}

// BuildLogEntry is one line of a build's log.
type BuildLogEntry struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"` // debug, info, warn or error
	Message   string    `json:"message"`
	// Step is its number from 1, or base, or finalize; empty: unknown.
	Step string `json:"step"`
}

// BuildReason is why a build failed.
type BuildReason struct {
	Message string `json:"message"`
	Step    string `json:"step"`
}

// RequestBuild announces a build.
func (c *Client) RequestBuild(ctx context.Context, n NewBuild) (Build, error) {
	return fetch[Build](ctx, c, http.MethodPost, "/v3/templates", n)
}

// BuildFiles asks for the files of a hash.
func (c *Client) BuildFiles(ctx context.Context, templateID, hash string) (BuildFiles, error) {
	return fetch[BuildFiles](ctx, c, http.MethodGet, "/templates/"+url.PathEscape(templateID)+"/files/"+url.PathEscape(hash), nil)
}

// UploadFiles sends an archive of size bytes to where BuildFiles says, without the key.
func (c *Client) UploadFiles(ctx context.Context, to BuildFiles, archive io.Reader, size int64) error {
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
	if c.cfg.UserAgent != "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	res, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return fmt.Errorf("upload files: %w: %w", err, errs.ErrUnavailable)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("upload files: %w", readError(res))
	}
	return nil
}

// StartBuild starts a build whose files are uploaded.
func (c *Client) StartBuild(ctx context.Context, b Build, s BuildStart) error {
	return c.do(ctx, http.MethodPost, "/v2"+b.path(), s)
}

// BuildStatus reads a build's stage, and its log after offset entries.
func (c *Client) BuildStatus(ctx context.Context, b Build, offset int) (BuildStatus, error) {
	var out BuildStatus
	_, err := c.call(ctx, http.MethodGet, b.path()+"/status", url.Values{"logsOffset": {strconv.Itoa(offset)}}, nil, &out)
	return out, err
}

// CancelBuild ends a build that runs or waits for its steps; one that has ended is an errs.ErrConflict.
func (c *Client) CancelBuild(ctx context.Context, b Build) error {
	return c.do(ctx, http.MethodDelete, b.path(), nil)
}

func (b Build) path() string {
	return "/templates/" + url.PathEscape(b.TemplateID) + "/builds/" + url.PathEscape(b.BuildID)
}
