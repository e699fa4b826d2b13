package baseimage

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// isSource reports whether a line is valid in sources.list.
func isSource(line string) bool {
	uri, suite := sourceParts(line)
	return suite != "" && strings.Contains(uri, ":/") && !strings.ContainsAny(line, "\n\r")
}

// sourceParts returns the URI and the suite of a line of sources.list, or nothing if it is not a line for
// binary packages.
func sourceParts(line string) (uri, suite string) {
	rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
	if !ok {
		return "", ""
	}
	rest = strings.TrimSpace(rest)
	if strings.HasPrefix(rest, "[") {
		_, rest, ok = strings.Cut(rest, "]")
		if !ok {
			return "", ""
		}
	}
	fields := strings.Fields(rest)
	if len(fields) < 3 {
		return "", ""
	}
	return fields[0], fields[1]
}

// hostSources returns the lines from which the host under root gets its own Debian release, changed to suite:
// its mirror is near and allowed. Hosts of other distributions have none: mmdebstrap then uses Debian's
// defaults.
func hostSources(ctx context.Context, root, suite string) ([]string, error) {
	own, err := debianRelease(root)
	if err != nil {
		return nil, err
	}
	if own == "" {
		return nil, nil
	}
	files, err := filepath.Glob(filepath.Join(root, "etc/apt/sources.list.d/*"))
	if err != nil {
		return nil, fmt.Errorf("list package sources: %w", err)
	}
	var found []string
	for _, file := range append([]string{filepath.Join(root, "etc/apt/sources.list")}, files...) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		data, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		switch filepath.Ext(file) {
		case ".list":
			found = append(found, listSources(data)...)
		case ".sources":
			found = append(found, stanzaSources(data)...)
		}
	}
	lines := retarget(found, own, suite)
	if len(lines) == 0 {
		return nil, nil
	}
	return lines, nil
}

// retarget selects the lines for the release own and changes them to suite.
func retarget(lines []string, own, suite string) []string {
	var kept []string
	for _, line := range lines {
		_, s := sourceParts(line)
		tail, ok := strings.CutPrefix(s, own)
		if !ok || !slices.Contains([]string{"", "-updates", "-security"}, tail) {
			continue
		}
		line = strings.Replace(line, " "+s+" ", " "+suite+tail+" ", 1)
		if !slices.Contains(kept, line) {
			kept = append(kept, line)
		}
	}
	// The release itself is required.
	isMain := func(l string) bool { _, s := sourceParts(l); return s == suite }
	if !slices.ContainsFunc(kept, isMain) {
		return nil
	}
	slices.SortStableFunc(kept, func(a, b string) int {
		switch {
		case isMain(a) == isMain(b):
			return 0
		case isMain(a):
			return -1
		default:
			return 1
		}
	})
	return kept
}

// debianRelease returns the code name of the Debian under root, or nothing for other distributions.
func debianRelease(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	values := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			values[key] = strings.Trim(value, `"'`)
		}
	}
	if values["ID"] != "debian" {
		return "", nil
	}
	return values["VERSION_CODENAME"], nil
}

// listSources parses the one-line format.
func listSources(data []byte) []string {
	var lines []string
	for line := range strings.Lines(string(data)) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.Join(strings.Fields(line), " "); isSource(line) {
			lines = append(lines, line)
		}
	}
	return lines
}

// stanzaSources parses the format of stanzas (deb822) and returns it as lines. A stanza with an inline key is
// omitted: a line cannot express that.
func stanzaSources(data []byte) []string {
	var lines []string
	stanza := map[string]string{}
	flush := func() {
		lines = append(lines, stanzaLines(stanza)...)
		clear(stanza)
	}
	var key string
	scan := bufio.NewScanner(bytes.NewReader(data))
	for scan.Scan() {
		line := scan.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			stanza[key] += "\n" + strings.TrimSpace(line)
		default:
			k, v, _ := strings.Cut(line, ":")
			key = strings.ToLower(strings.TrimSpace(k))
			stanza[key] = strings.TrimSpace(v)
		}
	}
	flush()
	return lines
}

func stanzaLines(stanza map[string]string) []string {
	if !slices.Contains(strings.Fields(stanza["types"]), "deb") || stanza["enabled"] == "no" {
		return nil
	}
	option := ""
	if key := stanza["signed-by"]; strings.Contains(key, "\n") {
		return nil
	} else if key != "" {
		option = "[signed-by=" + key + "] "
	}
	var lines []string
	components := strings.Join(strings.Fields(stanza["components"]), " ")
	for uri := range strings.FieldsSeq(stanza["uris"]) {
		for suite := range strings.FieldsSeq(stanza["suites"]) {
			if line := "deb " + option + uri + " " + suite + " " + components; isSource(line) {
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// proxies returns the proxies of the host's apt configuration as environment variables: mmdebstrap does not
// read the host's settings. Without apt or without a proxy there are none.
func proxies(ctx context.Context) []string {
	var env []string
	for _, scheme := range []string{"http", "https"} {
		if os.Getenv(scheme+"_proxy") != "" {
			continue
		}
		cmd := exec.CommandContext(ctx, "apt-config", "dump", "--format", "%v", "Acquire::"+scheme+"::Proxy")
		out, err := cmd.Output()
		if proxy := strings.TrimSpace(string(out)); err == nil && strings.Contains(proxy, "://") {
			env = append(env, scheme+"_proxy="+proxy)
		}
	}
	return env
}
