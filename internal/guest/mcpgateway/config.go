package mcpgateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// source is a server of the option `mcp` of E2B's SDKs, whose code is a repository of GitHub.
type source struct {
	// name is owner/repository.
	name       string
	InstallCmd string            `json:"installCmd"`
	RunCmd     string            `json:"runCmd"`
	Envs       map[string]string `json:"envs"`
}

var repository = regexp.MustCompile(`^github/([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*)$`)

// parse reads the servers of a configuration, in the order of their names. An error is an errs.ErrInvalid that names the server.
func parse(text string) (list []source, err error) {
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("--config: want a JSON object of servers: %w: %w", err, errs.ErrInvalid)
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		match := repository.FindStringSubmatch(key)
		if match == nil {
			return nil, unknown(key)
		}
		s := source{name: match[1]}
		d := json.NewDecoder(bytes.NewReader(all[key]))
		d.DisallowUnknownFields()
		if err := d.Decode(&s); err != nil {
			return nil, fmt.Errorf("%s: %w: %w", key, err, errs.ErrInvalid)
		}
		if strings.TrimSpace(s.RunCmd) == "" {
			return nil, fmt.Errorf("%s: runCmd: is required, the command that starts the server: %w", key, errs.ErrInvalid)
		}
		list = append(list, s)
	}
	return list, nil
}

// unknown is the error for a server that is not a repository: those of Docker's catalog are images, which need a Docker daemon.
func unknown(name string) error {
	return fmt.Errorf("%s: servers of Docker's catalog are container images, which a sandbox cannot run; use \"github/OWNER/REPOSITORY\" with runCmd: %w", name, errs.ErrInvalid)
}
